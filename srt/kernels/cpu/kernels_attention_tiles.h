// Attention over bfloat16 keys and values in AMX tiles.
//
// Queries and weights are rounded to bfloat16, as keys and values are. Every query has its own row of
// a tile, and columns are added in one order: a query's result depends on no other.
//
// A chunk's keys and values are put into tiles once, for all queries of the job. They do not fit the
// first-level cache, and bringing a tile from the second takes longer than multiplying it: so two
// tiles of queries use what was loaded. Vectors have half their speed while tiles are at work, so
// weights are made of few instructions.
namespace phloem {
namespace PHLOEM_ISA {

// bfloat16 of thirty-two float32, rounded to nearest even; denormals are zero.
static inline __m512i to_bf16(f32x16 first, f32x16 later) {
  __m512i out;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(out) : "v"(first), "v"(later));
  return out;
}

constexpr int MAX_DIM = 512;  // of a head

// 128 · (2^(i / 128) - 1), rounded.
struct Fractions {
  alignas(64) uint8_t of[128] = {};
  constexpr Fractions() {
    double power = 1;
    for (int i = 0; i < 128; i++, power *= 1.0054299011128029)  // 2^(1/128)
      of[i] = static_cast<uint8_t>(128 * (power - 1) + 0.5);
  }
};
constexpr Fractions FRACTIONS;

struct Ones {
  alignas(64) uint16_t of[TILE * 32] = {};
  constexpr Ones() {
    for (uint16_t& one : of) one = 0x3F80;
  }
};
constexpr Ones ONES;

class TileAttention {
  static constexpr int TOGETHER = 2 * TILE;  // queries
  // Numbers from one query's scores to the next one's: at a power of two, a load would wait for
  // stores to other rows with the same lowest bits.
  static constexpr int SCORES = CHUNK + LANES;

 public:
  explicit TileAttention(AttendJob& job)
      : job_(job), dim_(job.keys.dim), padded_((job.count + 2 * TILE - 1) / (2 * TILE) * 2 * TILE) {
    auto* p = reinterpret_cast<uint16_t*>(job.scratch);
    const auto take = [&](int numbers) { return p += numbers, p - numbers; };
    keys_ = take(CHUNK * dim_);
    values_ = take(CHUNK * dim_);
    queries_ = take(TOGETHER * dim_);
    scores_ = reinterpret_cast<float*>(p);
    sums_ = scores_ + TOGETHER * SCORES;
  }

  void run() {
    TileShapes shapes;
    const int rows = job_.queries < TILE ? job_.queries : TILE;
    for (int t = 0; t < 8; t++) shapes.set(t, t < 6 ? rows : TILE, 64);
    tiles_configure(shapes);
    stage_keys();
    stage_values();
    int from = 0;
    for (; job_.queries - from > TILE; from += TOGETHER)
      attend<2>(from, job_.queries - from < TOGETHER ? job_.queries - from : TOGETHER);
    if (from < job_.queries) attend<1>(from, job_.queries - from);
    tiles_release();
  }

 private:
  // Queries in T tiles.
  template <int T>
  void attend(int from, int count) {
    for (int i = 0; i < count; i++)
      for (int d = 0; d < dim_; d += 32) {
        const float* query = job_.query[from + i] + d;
        _mm512_storeu_si512(queries_ + i * dim_ + d, to_bf16(load(query), load(query + LANES)));
      }
    score<T>();
    for (int i = 0; i < count; i++) weigh(from + i, i);
    add_values<T>();
    for (int i = 0; i < count; i += TILE) merge(from, i, count - i < TILE ? count - i : TILE);
  }

  // What this chunk gave for queries begin to begin + count of those from `from` on, into what the
  // earlier ones gave; see phloem::merge.
  void merge(int from, int begin, int count) {
    float peaks[TILE] = {}, totals[TILE] = {}, before[TILE], now[TILE];
    Softmax** states = job_.state + from + begin;
    for (int i = 0; i < count; i++) {
      peaks[i] = states[i]->peak;
      totals[i] = states[i]->total;
    }
    const f32x16 own_peaks = load(peaks_ + begin), own_totals = load(totals_ + begin);
    const f32x16 peak = max(load(peaks), own_peaks);
    const f32x16 finite = max(peak, splat(-3.0e38f));  // where no key was seen there is no peak
    const f32x16 a = decay(sub(load(peaks), finite)), b = decay(sub(own_peaks, finite));
    store(totals, fma(load(totals), a, mul(own_totals, b)));
    store(peaks, peak);
    store(before, a);
    store(now, b);
    for (int i = 0; i < count; i++) {
      Softmax& state = *states[i];
      state.peak = peaks[i];
      state.total = totals[i];
      const f32x16 was = splat(before[i]), is = splat(now[i]);
      for (int d = 0; d < dim_; d += LANES) {
        const f32x16 own = mul(load(sums_ + (begin + i) * dim_ + d), is);
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
    const auto row = [&](int i) {
      return reinterpret_cast<const uint16_t*>(kv.slot(job_.slots[i])) + job_.head * dim_;
    };
    Rows found;
    for (int i = 0; i < TILE; i++)
      found.row[i] = from + i < job_.count ? row(from + i) : zeros;
    for (int i = from + TILE; i < from + 2 * TILE && i < job_.count; i++)
      for (int d = 0; d < dim_; d += 32) __builtin_prefetch(row(i) + d);
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
        const int place = i / 4 * 8 + i % 4 + from % 32 / 4;  // see `weigh`
        uint16_t* out = values_ + from / 32 * 32 * dim_ + place * LANES;
        for (int d = 0; d < dim_; d += 32, out += 2 * TILE * 32) {
          const __m512i a = _mm512_loadu_si512(values.row[i] + d);
          const __m512i b = _mm512_loadu_si512(values.row[i + 1] + d);
          _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, pairs, b));
          _mm512_storeu_si512(out + TILE * 32, _mm512_permutex2var_epi16(a, later, b));
        }
      }
    }
  }

  // What a product reads: tiles, in steps, each with what lies between two of them, in numbers.
  struct Left {
    const uint16_t* at;
    int row, tile, step;
  };
  struct Right {
    const uint16_t* at;
    int tile, step;
  };

  // T tiles of rows by N tiles of columns, over `steps` of 32; out [T · TILE][stride]. Tiles 0 to 3 are
  // sums, 4 and 5 rows, 6 and 7 columns. What is loaded is used as often as there is room for sums.
  template <int T, int N>
  static void multiply(Left a, Right b, int steps, float* out, int stride) {
    tile_clear<0>();
    if (T * N > 1) tile_clear<1>();
    if (T * N > 2) tile_clear<2>();
    if (T * N > 3) tile_clear<3>();
    for (int s = 0; s < steps; s++, a.at += a.step, b.at += b.step) {
      tile_load<4>(a.at, 2 * a.row);
      if (T == 2) tile_load<5>(a.at + a.tile, 2 * a.row);
      tile_load<6>(b.at, 64);
      tile_dot_bf16<0, 4, 6>();
      if (T == 2) tile_dot_bf16<N, 5, 6>();
      if (N == 1) continue;
      tile_load<7>(b.at + b.tile, 64);
      tile_dot_bf16<1, 4, 7>();
      if (T == 2) tile_dot_bf16<N + 1, 5, 7>();
      if (N == 2) continue;
      tile_load<6>(b.at + 2 * b.tile, 64);
      tile_dot_bf16<2, 4, 6>();
      tile_load<7>(b.at + 3 * b.tile, 64);
      tile_dot_bf16<3, 4, 7>();
    }
    const auto bytes = static_cast<ptrdiff_t>(sizeof(float)) * stride;
    const auto place = [=](int tile) { return out + tile / N * TILE * stride + tile % N * TILE; };
    tile_store<0>(place(0), bytes);
    if (T * N > 1) tile_store<1>(place(1), bytes);
    if (T * N > 2) tile_store<2>(place(2), bytes);
    if (T * N > 3) tile_store<3>(place(3), bytes);
  }

  // The same for `columns` tiles of columns, an even number.
  template <int T>
  static void multiply_all(const Left& a, Right b, int columns, int steps, float* out, int stride) {
    constexpr int N = 4 / T;
    int n = 0;
    for (; n + N <= columns; n += N, b.at += N * b.tile)
      multiply<T, N>(a, b, steps, out + n * TILE, stride);
    if (n < columns) multiply<T, 2>(a, b, steps, out + n * TILE, stride);
  }

  // scores [query][key]
  template <int T>
  void score() {
    const Left queries{queries_, dim_, TILE * dim_, 32};
    const Right keys{keys_, TILE * dim_, TILE * 32};
    multiply_all<T>(queries, keys, padded_ / TILE, dim_ / 32, scores_, SCORES);
  }

  // sums [query][dimension] = weights · values; totals: the sums of weights.
  template <int T>
  void add_values() {
    const Left weights{reinterpret_cast<const uint16_t*>(scores_), 2 * SCORES, 2 * TILE * SCORES, 64};
    const Right values{values_, TILE * 32, 32 * dim_};
    multiply_all<T>(weights, values, dim_ / TILE, padded_ / 32, sums_, dim_);
    float totals[T * TILE][LANES];
    multiply<T, 1>(weights, {ONES.of, 0, 0}, padded_ / 32, totals[0], LANES);
    for (int i = 0; i < T * TILE; i++) totals_[i] = totals[i][0];
  }

  // From the scores of query q of the job, row i of the tile, to weights: exp(score - peak) as bfloat16,
  // where the first of each two vectors of scores was. In these, four weights of the first vector are
  // followed by four of the second one, and so on.
  void weigh(int q, int i) {
    const int first = job_.first[q], end = job_.end[q];
    float* row = scores_ + i * SCORES;
    int begin = 0, finish = 0;  // what the query sees, in pairs of vectors
    peaks_[i] = -INFINITY;
    if (first < end) {
      begin = first / 32;
      finish = (end + 31) / 32;
      if (job_.soft_cap > 0)
        for (int v = 2 * begin; v < 2 * finish; v++)
          store(row + v * LANES, soft_capped(load(row + v * LANES), job_.soft_cap));
      if (first % 32) hide(row, begin, first, end);
      if (end % 32) hide(row, finish - 1, first, end);
      peaks_[i] = peak_of(row, begin, finish);
    }
    const PowerOfTwo power(peaks_[i]);
    const __m512i none = _mm512_setzero_si512();
    for (int p = 0; p < begin; p++) _mm512_storeu_si512(row + p * 32, none);
    for (int p = begin; p < finish; p++)
      _mm512_storeu_si512(row + p * 32, power(load(row + p * 32), load(row + p * 32 + LANES)));
    for (int p = finish; p < padded_ / 32; p++) _mm512_storeu_si512(row + p * 32, none);
  }

  // Leaves no score of keys outside [first, end) in a pair of vectors.
  static void hide(float* row, int pair, int first, int end) {
    for (int v = 2 * pair; v < 2 * pair + 2; v++) {
      const auto below = [&](int key) {
        const int lanes = key - v * LANES;
        return lanes <= 0 ? 0 : lanes >= LANES ? 0xFFFF : (1 << lanes) - 1;
      };
      const auto seen = static_cast<__mmask16>(below(end) & ~below(first));
      store(row + v * LANES, _mm512_mask_mov_ps(splat(-INFINITY), seen, load(row + v * LANES)));
    }
  }

  // The largest score; not a number where any is none, so that the query's result is none either.
  static float peak_of(const float* row, int begin, int finish) {
    f32x16 a = splat(-INFINITY), b = a;
    __mmask16 none = 0;
    for (int p = begin; p < finish; p++) {
      const f32x16 x = load(row + p * 32), y = load(row + p * 32 + LANES);
      none |= _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q);
      a = max(a, x);
      b = max(b, y);
    }
    return none ? NAN : largest(max(a, b));
  }

  // exp(x - peak) as bfloat16, for x that are no larger. A bfloat16's bits, as a whole number, are its
  // logarithm in steps of 1/128 octave from 2^-127 on, but for the fraction of an octave, which is
  // straight there: what it is bent to is looked up. Both roundings together are within 0.67 %.
  class PowerOfTwo {
   public:
    explicit PowerOfTwo(float peak)
        : most_(splat(127.0f * 128 - STEPS * peak)),
          low_(_mm512_load_si512(FRACTIONS.of)),
          high_(_mm512_load_si512(FRACTIONS.of + 64)) {}
    __m512i operator()(f32x16 x, f32x16 y) const {
      const auto bits = [&](f32x16 v) {
        return _mm512_cvtps_epi32(fma(v, splat(STEPS), most_));
      };
      // Below 2^-127, and what was hidden, becomes 0.
      const __m512i straight = _mm512_packus_epi32(bits(x), bits(y));
      const __m512i bent = _mm512_permutex2var_epi8(low_, straight, high_);
      return _mm512_ternarylogic_epi32(straight, bent, _mm512_set1_epi16(127), 0xD8);
    }

   private:
    static constexpr float STEPS = 128 * 1.44269504f;
    const f32x16 most_;
    const __m512i low_, high_;
  };

  AttendJob& job_;
  const int dim_, padded_;
  uint16_t* keys_;     // [key / 16][dim / 32][dim % 32 / 2][key % 16][2]
  uint16_t* values_;   // [key / 32][dim / 16][key % 32 / 2][dim % 16][2], keys as in `weigh`
  uint16_t* queries_;  // [TOGETHER][dim]
  float* scores_;      // [TOGETHER][SCORES], then weights
  float* sums_;        // [TOGETHER][dim]
  float peaks_[TOGETHER] = {}, totals_[TOGETHER] = {};
};

}  // namespace PHLOEM_ISA
}  // namespace phloem
