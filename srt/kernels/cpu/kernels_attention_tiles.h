// Attention over bfloat16 keys and values in AMX tiles.
//
// A float32 is the sum of two bfloat16, but for its last 8 bits. With both parts of queries a score is
// as good as one of 16 bits; weights are rounded to bfloat16, as values are. Every query has its own
// row of a tile, and columns are added in one order: a query's result depends on no other.
namespace phloem {
namespace PHLOEM_ISA {

// Two bfloat16 parts of numbers.
struct Parts {
  uint16_t *high, *low;
};

// bfloat16 of thirty-two float32, rounded to nearest even; denormals are zero.
static inline __m512i to_bf16(f32x16 first, f32x16 later) {
  __m512i out;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(out) : "v"(first), "v"(later));
  return out;
}
static inline void split(f32x16 first, f32x16 later, Parts out) {
  const __m512i upper = _mm512_set1_epi32(-65536);
  const f32x16 a = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(first), upper));
  const f32x16 b = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(later), upper));
  _mm512_storeu_si512(out.high, to_bf16(a, b));
  _mm512_storeu_si512(out.low, to_bf16(sub(first, a), sub(later, b)));
}

constexpr int MAX_DIM = 512;  // of a head

class TileAttention {
 public:
  explicit TileAttention(AttendJob& job)
      : job_(job), dim_(job.keys.dim), padded_((job.count + 2 * TILE - 1) / (2 * TILE) * 2 * TILE) {
    auto* p = reinterpret_cast<uint16_t*>(job.scratch);
    const auto take = [&](int numbers) { return p += numbers, p - numbers; };
    keys_ = take(CHUNK * dim_);
    values_ = take(CHUNK * dim_);
    queries_ = {take(TILE * dim_), take(TILE * dim_)};
    scores_ = reinterpret_cast<float*>(p);
    sums_ = scores_ + TILE * CHUNK;
  }

  void run() {
    TileShapes shapes;
    for (int t = 0; t < 8; t++)
      shapes.set(t, t < 6 && job_.queries < TILE ? job_.queries : TILE, 64);
    tiles_configure(shapes);
    stage_keys();
    stage_values();
    for (int from = 0; from < job_.queries; from += TILE)
      attend(from, job_.queries - from < TILE ? job_.queries - from : TILE);
    tiles_release();
  }

 private:
  // Tiles that have not worked for some 2,000 cycles take nearly as long to wake.
  static void keep_awake() { tile_dot_bf16<0, 4, 6>(); }

  void attend(int from, int count) {
    for (int i = 0; i < count; i++)
      for (int d = 0; d < dim_; d += 32) {
        const float* query = job_.query[from + i] + d;
        split(load(query), load(query + LANES),
              {queries_.high + i * dim_ + d, queries_.low + i * dim_ + d});
      }
    score();
    for (int i = 0; i < count; i++) {
      if (i % 8 == 4) keep_awake();
      peaks_[i] = peak_of(seen(from + i), scores_ + i * CHUNK);
    }
    for (int i = 0; i < count; i++) {
      if (i % 4 == 0) keep_awake();
      totals_[i] = weigh(seen(from + i), peaks_[i], scores_ + i * CHUNK);
    }
    add_values();
    merge(from, count);
  }

  // What this chunk gave for `count` queries, into what the earlier ones gave; see phloem::merge.
  void merge(int from, int count) {
    float peaks[TILE] = {}, totals[TILE] = {}, before[TILE], now[TILE];
    for (int i = 0; i < count; i++) {
      peaks[i] = job_.state[from + i]->peak;
      totals[i] = job_.state[from + i]->total;
    }
    const f32x16 peak = max(load(peaks), load(peaks_));
    const f32x16 finite = max(peak, splat(-3.0e38f));  // where no key was seen there is no peak
    const f32x16 a = decay(sub(load(peaks), finite)), b = decay(sub(load(peaks_), finite));
    store(totals, fma(load(totals), a, mul(load(totals_), b)));
    store(peaks, peak);
    store(before, a);
    store(now, b);
    for (int i = 0; i < count; i++) {
      if (i % 8 == 4) keep_awake();
      Softmax& state = *job_.state[from + i];
      state.peak = peaks[i];
      state.total = totals[i];
      const f32x16 was = splat(before[i]), is = splat(now[i]);
      for (int d = 0; d < dim_; d += LANES) {
        const f32x16 own = mul(load(sums_ + i * dim_ + d), is);
        store(state.sums + d, fma(load(state.sums + d), was, own));
      }
    }
  }

  struct Rows {
    const uint16_t* row[TILE];
  };
  // Sixteen rows from `from` on, zeros beyond the chunk's end. The next ones are fetched meanwhile:
  // slots lie anywhere, no hardware foresees them.
  Rows rows(const KvArray& kv, int from) const {
    alignas(64) static const uint16_t zeros[MAX_DIM] = {};
    const size_t slot = static_cast<size_t>(kv.heads) * dim_;
    const auto* base =
        reinterpret_cast<const uint16_t*>(kv.data) + static_cast<size_t>(job_.head) * dim_;
    Rows found;
    for (int i = 0; i < TILE; i++)
      found.row[i] = from + i < job_.count ? base + job_.slots[from + i] * slot : zeros;
    for (int i = from + TILE; i < from + 2 * TILE && i < job_.count; i++)
      for (int d = 0; d < dim_; d += 32) __builtin_prefetch(base + job_.slots[i] * slot + d);
    return found;
  }

  // A tile for sixteen keys and 32 dimensions of them: pairs of dimensions, each of all keys.
  void stage_keys() {
    uint16_t* out = keys_;
    for (int from = 0; from < padded_; from += TILE) {
      const Rows keys = rows(job_.keys, from);
      for (int d = 0; d < dim_; d += 32, out += TILE * 32)
        transpose([&](int i) { return _mm512_loadu_ps(keys.row[i] + d); },
                  reinterpret_cast<float*>(out));
    }
  }

  // A tile for sixteen dimensions and 32 values: pairs of values, each of all dimensions.
  void stage_values() {
    // Lane by lane the first sixteen numbers of both rows; the others are sixteen further on.
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i pairs = _mm512_or_si512(
        lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)), 16));
    const __m512i later = _mm512_add_epi16(pairs, _mm512_set1_epi16(16));
    for (int from = 0; from < padded_; from += TILE) {
      const Rows values = rows(job_.values, from);
      for (int i = 0; i < TILE; i += 2) {
        uint16_t* out = values_ + from / 32 * 32 * dim_ + (from % 32 + i) * LANES;
        for (int d = 0; d < dim_; d += 32, out += 2 * TILE * 32) {
          const __m512i a = _mm512_loadu_si512(values.row[i] + d);
          const __m512i b = _mm512_loadu_si512(values.row[i + 1] + d);
          _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, pairs, b));
          _mm512_storeu_si512(out + TILE * 32, _mm512_permutex2var_epi16(a, later, b));
        }
      }
    }
  }

  // A product with both parts of what tiles 4 and 5 hold.
  template <int C>
  static void multiply(const uint16_t* b) {
    tile_load<6>(b, 64);
    tile_dot_bf16<C, 4, 6>();
    tile_dot_bf16<C, 5, 6>();
  }

  // scores [query][key], two tiles of keys at a time.
  void score() {
    const ptrdiff_t stride = 2 * dim_;
    for (int from = 0; from < padded_; from += 2 * TILE) {
      const uint16_t* keys = keys_ + from * dim_;
      tile_clear<0>();
      tile_clear<1>();
      for (int d = 0; d < dim_; d += 32, keys += TILE * 32) {
        tile_load<4>(queries_.high + d, stride);
        tile_load<5>(queries_.low + d, stride);
        multiply<0>(keys);
        multiply<1>(keys + TILE * dim_);
      }
      tile_store<0>(scores_ + from, sizeof(float) * CHUNK);
      tile_store<1>(scores_ + from + TILE, sizeof(float) * CHUNK);
    }
  }

  // The keys that a query sees, as vectors of sixteen from `begin` to `end`, of which the outermost
  // ones may be seen in part.
  struct Seen {
    int begin, end;
    __mmask16 first, last;
  };
  Seen seen(int q) const {
    const int first = job_.first[q], end = job_.end[q];
    if (first >= end) return {0, 0, 0, 0};
    return {first / LANES, (end + LANES - 1) / LANES,
            static_cast<__mmask16>(0xFFFF << first % LANES),
            static_cast<__mmask16>(0xFFFF >> (LANES - 1 - (end - 1) % LANES))};
  }

  // The largest score that a query sees; caps the scores, and leaves none of what it does not see in
  // the vectors from begin to end.
  float peak_of(const Seen& seen, float* row) {
    if (job_.soft_cap > 0)
      for (int i = seen.begin; i < seen.end; i++)
        store(row + i * LANES, soft_capped(load(row + i * LANES), job_.soft_cap));
    if (seen.begin < seen.end) {
      hide(row + seen.begin * LANES, seen.first);
      hide(row + (seen.end - 1) * LANES, seen.last);
    }
    f32x16 peaks = splat(-INFINITY);
    for (int i = seen.begin; i < seen.end; i++) peaks = max(peaks, load(row + i * LANES));
    return largest(peaks);
  }
  static void hide(float* row, __mmask16 seen) {
    store(row, _mm512_mask_mov_ps(splat(-INFINITY), seen, load(row)));
  }

  // 2^x to 17 bits for x ≤ 0, exactly zero from -127 on (a polynomial of degree 4 around the nearest
  // whole number, which adding 1.5 · 2²³ leaves in the lowest bits).
  static f32x16 power_of_two(f32x16 x) {
    const f32x16 magic = splat(12582912.0f);
    x = max(splat(-127.0f), x);  // which lets through what is no number
    const f32x16 shifted = add(x, magic), r = sub(x, sub(shifted, magic));
    f32x16 p = splat(9.58285e-3f);
    p = fma(p, r, splat(5.590643e-2f));
    p = fma(p, r, splat(2.4024099e-1f));
    p = fma(p, r, splat(6.9312419e-1f));
    p = fma(p, r, splat(1.0f));
    const __m512i whole = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), whole));
  }

  // From scores to weights, as bfloat16 where the first half of each two vectors of scores was.
  // Returns their sum.
  float weigh(const Seen& seen, float peak, float* row) {
    const f32x16 log2e = splat(1.44269504f), most = splat(-1.44269504f * peak);
    f32x16 totals = zero();
    const auto weight = [&](int i) {
      if (i < seen.begin || i >= seen.end) return zero();
      return power_of_two(fma(load(row + i * LANES), log2e, most));
    };
    for (int i = 0; i < padded_ / LANES; i += 2) {
      const f32x16 a = weight(i), b = weight(i + 1);
      totals = add(add(totals, a), b);
      _mm512_storeu_si512(row + i * LANES, to_bf16(a, b));
    }
    return sum(totals);
  }

  template <int C>
  static void add_product(const uint16_t* b) {
    tile_load<6>(b, 64);
    tile_dot_bf16<C, 4, 6>();
  }

  // sums [query][dimension] = weights · values, 64 dimensions at a time.
  void add_values() {
    int d = 0;
    for (; d + 64 <= dim_; d += 64) add_values<4>(d);
    if (d < dim_) add_values<2>(d);
  }
  template <int N>  // tiles
  void add_values(int d) {
    tile_clear<0>();
    tile_clear<1>();
    if (N == 4) {
      tile_clear<2>();
      tile_clear<3>();
    }
    for (int from = 0; from < padded_; from += 32) {
      const uint16_t* values = values_ + (from * dim_ + d * 32);
      tile_load<4>(scores_ + from, sizeof(float) * CHUNK);
      add_product<0>(values);
      add_product<1>(values + TILE * 32);
      if (N == 4) {
        add_product<2>(values + 2 * TILE * 32);
        add_product<3>(values + 3 * TILE * 32);
      }
    }
    const auto stride = static_cast<ptrdiff_t>(sizeof(float)) * dim_;
    tile_store<0>(sums_ + d, stride);
    tile_store<1>(sums_ + d + LANES, stride);
    if (N == 4) {
      tile_store<2>(sums_ + d + 2 * LANES, stride);
      tile_store<3>(sums_ + d + 3 * LANES, stride);
    }
  }

  AttendJob& job_;
  const int dim_, padded_;
  uint16_t* keys_;    // [key / 16][dim / 32][dim % 32 / 2][key % 16][2]
  uint16_t* values_;  // [key / 32][dim / 16][key % 32 / 2][dim % 16][2]
  Parts queries_;     // [TILE][dim]
  float* scores_;     // [TILE][CHUNK], then weights
  float* sums_;       // [TILE][dim]
  float peaks_[TILE] = {}, totals_[TILE] = {};
};

}  // namespace PHLOEM_ISA
}  // namespace phloem
