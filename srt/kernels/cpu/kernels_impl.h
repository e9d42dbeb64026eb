// The kernels, in the words of a vector header. Included once for each instruction set.
//
// A row's result depends on nothing but the row: sums run over columns, keys and lanes in one fixed
// order, however many rows are computed together, and by the same rounded operations on every CPU.
#include "kernels.h"

namespace phloem {
namespace PHLOEM_ISA {

// ------------------------------------------------------------------------------------ functions

static inline f32x16 load_part(const float* p, int n) {
  float lanes[LANES] = {};
  std::memcpy(lanes, p, sizeof(float) * static_cast<size_t>(n));
  return load(lanes);
}

static inline void store_part(float* p, f32x16 v, int n) {
  float lanes[LANES];
  store(lanes, v);
  std::memcpy(p, lanes, sizeof(float) * static_cast<size_t>(n));
}

// e^x to 1 unit in the last place or two, clamped to [-87, 88] (Cody and Waite's reduction, and a
// minimax polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]).
static inline f32x16 exponential(f32x16 x) {
  x = min(splat(88.0f), max(splat(-87.0f), x));
  const f32x16 n = round(mul(x, splat(1.44269504f)));
  f32x16 r = fma(n, splat(-0.693145752f), x);
  r = fma(n, splat(-1.42860677e-6f), r);
  f32x16 p = splat(1.3888889e-3f);
  p = fma(p, r, splat(8.3333333e-3f));
  p = fma(p, r, splat(4.1666667e-2f));
  p = fma(p, r, splat(1.6666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return mul(p, exp2_whole(n));
}

// e^x for x ≤ 0, exactly zero below -87.
static inline f32x16 decay(f32x16 x) { return zero_if_less(x, splat(-87.0f), exponential(x)); }

static inline float decay_of(float x) {
  float lanes[LANES];
  store(lanes, decay(splat(x)));
  return lanes[0];
}

// Codes are x · lift · inverse_scale. The lift, a power of two and nearly always one, keeps the
// inverse of the smallest peaks finite.
static inline float lift_of(float peak) { return peak < 0x1p-100f ? 0x1p60f : 1.0f; }
static inline float inverse_scale(float peak) {
  return peak > 0 ? 127.0f / (peak * lift_of(peak)) : 0.0f;
}

static void quantize(const float* x, int columns, const QuantizedRow& out) {
  for (int g = 0; g * GROUP < columns; g++) {
    const float* p = x + g * GROUP;
    const int left = columns - g * GROUP;
    f32x16 a, b;
    if (left >= GROUP) {
      a = load(p);
      b = load(p + LANES);
    } else {
      a = left >= LANES ? load(p) : load_part(p, left);
      b = left > LANES ? load_part(p + LANES, left - LANES) : zero();
    }
    // Not-a-number and infinity are the largest magnitudes, so they end up in the scale.
    const float peak = largest_magnitude(larger_magnitudes(a, b));
    const f32x16 factor = splat(inverse_scale(peak)), lift = splat(lift_of(peak));
    store_s8(out.q + g * GROUP, round(mul(mul(a, lift), factor)));
    store_s8(out.q + g * GROUP + LANES, round(mul(mul(b, lift), factor)));
    int32_t first, second;
    sum_codes(out.q + g * GROUP, first, second);
    out.scale[g] = peak / 127.0f;
    out.sum[g] = first + second;
    out.scaled_sum[g] = out.scale[g] * static_cast<float>(out.sum[g]);
    out.half_sum[2 * g] = first;
    out.half_sum[2 * g + 1] = second;
  }
}

static void rms_norm(const float* x, const float* w, int n, float eps, float* out) {
  f32x16 squares = zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  if (i < n) squares = fma(load_part(x + i, n - i), load_part(x + i, n - i), squares);
  const float mean = sum(squares) / static_cast<float>(n);
  const f32x16 factor = splat(1.0f / std::sqrt(mean + eps));
  for (i = 0; i + LANES <= n; i += LANES)
    store(out + i, mul(mul(load(x + i), factor), load(w + i)));
  if (i < n) {
    const f32x16 last = mul(mul(load_part(x + i, n - i), factor), load_part(w + i, n - i));
    store_part(out + i, last, n - i);
  }
}

static void silu_and_mul(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; i += LANES) {
    const f32x16 g = load(gate + i);
    const f32x16 below = add(splat(1.0f), exponential(sub(zero(), g)));
    store(out + i, mul(div(g, below), load(up + i)));
  }
}

static void accumulate(float* x, const float* y, int n) {
  for (int i = 0; i < n; i += LANES) store(x + i, add(load(x + i), load(y + i)));
}

static inline void rotate_lanes(float* x, const float* cos, const float* sin, int half, int i,
                                int n) {
  const bool whole = n == LANES;
  const f32x16 a = whole ? load(x + i) : load_part(x + i, n);
  const f32x16 b = whole ? load(x + half + i) : load_part(x + half + i, n);
  const f32x16 c = whole ? load(cos + i) : load_part(cos + i, n);
  const f32x16 s = whole ? load(sin + i) : load_part(sin + i, n);
  const f32x16 first = sub(mul(a, c), mul(b, s)), second = add(mul(b, c), mul(a, s));
  if (whole) {
    store(x + i, first);
    store(x + half + i, second);
  } else {
    store_part(x + i, first, n);
    store_part(x + half + i, second, n);
  }
}

static void rotate(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += LANES)
    rotate_lanes(x, cos, sin, half, i, half - i < LANES ? half - i : LANES);
}

// ----------------------------------------------------------------------------- integer products

template <bool WIDE>
static inline f32x16 load_scale(const uint8_t* p) {
  if (WIDE) return load(reinterpret_cast<const float*>(p));
  return load_f16(reinterpret_cast<const uint16_t*>(p));
}

// Weights are fetched into the second-level cache some kilobytes before their use: far enough ahead
// for memory to answer, and over the ends of pages, where the hardware's own look-ahead stops.
constexpr size_t AHEAD = 4096;

// The part of the next block that a tile fetches, `step` bytes with each group of its own. The
// tiles of a block divide the next one among them, so that memory is busy as long as they compute.
struct Fetch {
  const uint8_t* from;
  size_t step;
  void operator()(int g) const {
    const size_t begin = static_cast<size_t>(g) * step / 64, end = (g + 1) * step / 64;
    for (size_t line = begin; line < end; line++) __builtin_prefetch(from + line * 64, 0, 2);
  }
};

// Where things lie in a block of codes (see matrix.h).
template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE>
struct IntegerLayout {
  static constexpr int PART = SCALE_GROUP == 16 ? 16 : GROUP;  // columns that one scale is for
  static constexpr int PARTS = GROUP / PART;
  static constexpr size_t CODES = KIND == Kind::U4 ? GROUP * LANES / 2 : GROUP * LANES;
  static constexpr size_t SCALE = LANES * (WIDE ? 4 : 2);
  static constexpr size_t SCALES = SCALE_GROUP == 0 ? 0 : PARTS * SCALE;
  static constexpr size_t RECORD = 2 * (CODES + SCALES * (MIN ? 2 : 1));

  static const uint8_t* record(const uint8_t* block, int g) {
    return block + static_cast<size_t>(g / 2) * RECORD;
  }
  static const uint8_t* codes(const uint8_t* block, int g) {
    return record(block, g) + static_cast<size_t>(g % 2) * CODES;
  }
  static const uint8_t* scales(const uint8_t* block, int g, int part) {
    return record(block, g) + 2 * CODES + static_cast<size_t>(g % 2) * SCALES +
           static_cast<size_t>(part) * SCALE;
  }
  static const uint8_t* minima(const uint8_t* block, int g) {
    return record(block, g) + 2 * CODES + static_cast<size_t>(2 + g % 2) * SCALES;
  }
  static const uint8_t* row_scales(const Matrix& w, const uint8_t* block) {
    return block + w.records() * RECORD;
  }
};

// R rows of x against one block. Per group: the products of codes, exactly, in int32; then two
// roundings, one for the scaled products and one for the minima.
template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE, int R>
static inline void integer_tile(const Matrix& w, const uint8_t* block, const QuantizedRow* x,
                                Fetch fetch, float* const* out) {
  using Layout = IntegerLayout<KIND, SCALE_GROUP, MIN, WIDE>;
  constexpr int PART = Layout::PART, PARTS = Layout::PARTS;
  const int groups = w.groups();
  f32x16 total[R];
  for (int r = 0; r < R; r++) total[r] = zero();
  for (int g = 0; g < groups; g++) {
    const uint8_t* codes = Layout::codes(block, g);
    fetch(g);
    for (int part = 0; part < PARTS; part++) {
      i32x16 products[R];
      for (int r = 0; r < R; r++) {
        const int32_t sum_x = PARTS == 1 ? x[r].sum[g] : x[r].half_sum[2 * g + part];
        if (KIND == Kind::S8)
          products[r] = s8_start(sum_x);
        else
          products[r] = splat_i32(MIN ? 0 : -8 * sum_x);
      }
      const int first = g * GROUP + part * PART;
      for (int j = 0; j < (KIND == Kind::U4 ? 4 : PART / 4); j++, codes += 64) {
        const u8x64 run = load_codes(codes);
        if (KIND == Kind::U4) {
          const u8x64 low = low_nibbles(run), high = high_nibbles(run);
          for (int r = 0; r < R; r++) {
            const int8_t* columns = x[r].q + first + 4 * j;
            products[r] = dot_u4(products[r], low, load_x4(columns));
            products[r] = dot_u4(products[r], high, load_x4(columns + 16));
          }
        } else {
          for (int r = 0; r < R; r++)
            products[r] = dot_s8(products[r], run, load_x4(x[r].q + first + 4 * j));
        }
      }
      if (SCALE_GROUP == 0) {
        for (int r = 0; r < R; r++)
          total[r] = fma(to_float(products[r]), splat(x[r].scale[g]), total[r]);
        continue;
      }
      const f32x16 scale = load_scale<WIDE>(Layout::scales(block, g, part));
      for (int r = 0; r < R; r++)
        total[r] = fma(to_float(products[r]), mul(scale, splat(x[r].scale[g])), total[r]);
      if (MIN) {
        const f32x16 minimum = load_scale<WIDE>(Layout::minima(block, g));
        for (int r = 0; r < R; r++)
          total[r] = fma(minimum, splat(x[r].scaled_sum[g]), total[r]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    if (SCALE_GROUP == 0) total[r] = mul(total[r], load_scale<WIDE>(Layout::row_scales(w, block)));
    store(out[r], total[r]);
  }
}

template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE>
static void integer_gemm(const Matrix& w, int begin, int end, const Activations& x,
                         const int* rows, int count, float* out, ptrdiff_t stride) {
  constexpr int MANY = 64;  // rows whose descriptions are at hand while all blocks pass
  for (int from = 0; from < count; from += MANY) {
    const int many = count - from < MANY ? count - from : MANY;
    QuantizedRow row[MANY];
    for (int i = 0; i < many; i++) row[i] = x.quantized(rows ? rows[from + i] : from + i);
    for (int b = begin; b < end; b++) {
      const uint8_t* block = w.block(b);
      float* target[MANY];
      for (int i = 0; i < many; i++) target[i] = out + (from + i) * stride + (b - begin) * LANES;
      const size_t each = w.stride() / static_cast<size_t>(many);  // of the next block, for a row
      const size_t groups = static_cast<size_t>(w.groups());
      const auto fetch = [&](int i, int n) {
        return Fetch{block + w.stride() + i * each, (n * each + 64) / groups};
      };
      int i = 0;
      for (; i + ROWS_INT <= many; i += ROWS_INT)
        integer_tile<KIND, SCALE_GROUP, MIN, WIDE, ROWS_INT>(w, block, row + i,
                                                             fetch(i, ROWS_INT), target + i);
      for (; i + 4 <= many; i += 4)
        integer_tile<KIND, SCALE_GROUP, MIN, WIDE, 4>(w, block, row + i, fetch(i, 4), target + i);
      for (; i + 2 <= many; i += 2)
        integer_tile<KIND, SCALE_GROUP, MIN, WIDE, 2>(w, block, row + i, fetch(i, 2), target + i);
      for (; i < many; i++)
        integer_tile<KIND, SCALE_GROUP, MIN, WIDE, 1>(w, block, row + i, fetch(i, 1), target + i);
    }
  }
}

// ------------------------------------------------------------------------------- float products

template <Kind KIND>
static inline f32x16 load_weights(const uint8_t* p, ptrdiff_t column) {
  if (KIND == Kind::F32) return load(reinterpret_cast<const float*>(p) + column * LANES);
  if (KIND == Kind::F16) return load_f16(reinterpret_cast<const uint16_t*>(p) + column * LANES);
  return load_bf16(reinterpret_cast<const uint16_t*>(p) + column * LANES);
}

// R rows against B blocks. Even and odd columns are summed apart, then together.
template <Kind KIND, int R, int B>
static inline void float_tile(const Matrix& w, const uint8_t* block, const float* const* x,
                              float* const* out) {
  constexpr size_t BYTES = KIND == Kind::F32 ? 4 : 2;
  const size_t next = w.stride();
  f32x16 even[R][B], odd[R][B];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) even[r][b] = odd[r][b] = zero();
  int k = 0;
  for (; k + 2 <= w.columns; k += 2) {
    for (int b = 0; b < B; b++) {
      const uint8_t* later = block + b * next + AHEAD + static_cast<size_t>(k) * LANES * BYTES;
      for (size_t line = 0; line < 2 * LANES * BYTES; line += 64)
        __builtin_prefetch(later + line, 0, 2);
      const f32x16 first = load_weights<KIND>(block + b * next, k);
      const f32x16 second = load_weights<KIND>(block + b * next, k + 1);
      for (int r = 0; r < R; r++) {
        even[r][b] = fma(first, splat(x[r][k]), even[r][b]);
        odd[r][b] = fma(second, splat(x[r][k + 1]), odd[r][b]);
      }
    }
  }
  if (k < w.columns)
    for (int b = 0; b < B; b++) {
      const f32x16 last = load_weights<KIND>(block + b * next, k);
      for (int r = 0; r < R; r++) even[r][b] = fma(last, splat(x[r][k]), even[r][b]);
    }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) store(out[r] + b * LANES, add(even[r][b], odd[r][b]));
}

template <Kind KIND>
static void float_gemm(const Matrix& w, int begin, int end, const Activations& x, const int* rows,
                       int count, float* out, ptrdiff_t stride) {
  constexpr int MANY = 32;
  for (int from = 0; from < count; from += MANY) {
    const int many = count - from < MANY ? count - from : MANY;
    const float* row[MANY];
    for (int i = 0; i < many; i++) row[i] = x.row(rows ? rows[from + i] : from + i);
    for (int b = begin; b < end;) {
      const int together = many < ROWS_FLOAT && b + 4 <= end ? 4 : 1;
      const uint8_t* block = w.block(b);
      float* target[MANY];
      for (int i = 0; i < many; i++) target[i] = out + (from + i) * stride + (b - begin) * LANES;
      int i = 0;
      if (together == 4) {
        for (; i < many; i++) float_tile<KIND, 1, 4>(w, block, row + i, target + i);
      } else {
        for (; i + ROWS_FLOAT <= many; i += ROWS_FLOAT)
          float_tile<KIND, ROWS_FLOAT, 1>(w, block, row + i, target + i);
        for (; i < many; i++) float_tile<KIND, 1, 1>(w, block, row + i, target + i);
      }
      b += together;
    }
  }
}

static void gemm(const Matrix& w, int begin, int end, const Activations& x, const int* rows,
                 int count, float* out, ptrdiff_t stride) {
  auto* product = &float_gemm<Kind::F32>;
  if (w.kind == Kind::F16) product = &float_gemm<Kind::F16>;
  if (w.kind == Kind::BF16) product = &float_gemm<Kind::BF16>;
  if (w.kind == Kind::U4) {
    if (!w.has_min)
      product = &integer_gemm<Kind::U4, 32, false, false>;
    else if (w.wide_scale)
      product = &integer_gemm<Kind::U4, 32, true, true>;
    else
      product = &integer_gemm<Kind::U4, 32, true, false>;
  }
  if (w.kind == Kind::S8) {
    if (w.group == 0)
      product = &integer_gemm<Kind::S8, 0, false, true>;
    else if (w.group == 16)
      product = &integer_gemm<Kind::S8, 16, false, true>;
    else if (w.has_min)
      product = &integer_gemm<Kind::S8, 32, true, true>;
    else
      product = &integer_gemm<Kind::S8, 32, false, false>;
  }
  product(w, begin, end, x, rows, count, out, stride);
}

// ------------------------------------------------------------------------------------ attention

static void store_kv(const KvArray& kv, int slot, int head, const float* x) {
  const size_t place = static_cast<size_t>(slot) * kv.heads + head, at = place * kv.dim;
  if (kv.type == KvType::S8) {
    f32x16 peaks = zero();
    for (int i = 0; i < kv.dim; i += LANES) peaks = larger_magnitudes(peaks, load(x + i));
    const float peak = largest_magnitude(peaks);
    kv.scales[place] = peak / 127.0f;
    const f32x16 factor = splat(inverse_scale(peak)), lift = splat(lift_of(peak));
    for (int i = 0; i < kv.dim; i += LANES)
      store_s8(reinterpret_cast<int8_t*>(kv.data) + at + i,
               round(mul(mul(load(x + i), lift), factor)));
    return;
  }
  for (int i = 0; i < kv.dim; i += LANES) {
    const f32x16 v = load(x + i);
    if (kv.type == KvType::F32) store(reinterpret_cast<float*>(kv.data) + at + i, v);
    if (kv.type == KvType::F16) store_f16(reinterpret_cast<uint16_t*>(kv.data) + at + i, v);
    if (kv.type == KvType::BF16) store_bf16(reinterpret_cast<uint16_t*>(kv.data) + at + i, v);
  }
}

template <KvType TYPE>
static inline f32x16 load_kv(const uint8_t* row, int i) {
  if (TYPE == KvType::F32) return load(reinterpret_cast<const float*>(row) + i);
  if (TYPE == KvType::F16) return load_f16(reinterpret_cast<const uint16_t*>(row) + i);
  if (TYPE == KvType::BF16) return load_bf16(reinterpret_cast<const uint16_t*>(row) + i);
  return load_s8(reinterpret_cast<const int8_t*>(row) + i);
}

// Sixteen rows of a chunk as float32; beyond its end slot 0, which is always finite. The next
// sixteen are fetched meanwhile: slots lie anywhere, no hardware foresees them.
template <KvType TYPE, int V>
static inline void load_tile(const AttendJob& job, const KvArray& kv, int from, float* out) {
  constexpr size_t BYTES = TYPE == KvType::F32 ? 4 : TYPE == KvType::S8 ? 1 : 2;
  const int vectors = V ? V : kv.dim / LANES;
  const size_t row_bytes = static_cast<size_t>(vectors) * LANES * BYTES;
  const size_t slot_bytes = static_cast<size_t>(kv.heads) * row_bytes;
  const uint8_t* base = kv.data + static_cast<size_t>(job.head) * row_bytes;
  const int here = job.count - from < LANES ? job.count - from : LANES;
  const int ahead = job.count - from - LANES < LANES ? job.count - from - LANES : LANES;
  for (int i = 0; i < ahead; i++) {
    const uint8_t* row = base + static_cast<size_t>(job.slots[from + LANES + i]) * slot_bytes;
    for (size_t line = 0; line < row_bytes; line += 64) __builtin_prefetch(row + line);
  }
  for (int i = 0; i < LANES; i++) {
    const size_t slot = i < here ? static_cast<size_t>(job.slots[from + i]) : 0;
    const uint8_t* row = base + slot * slot_bytes;
    for (int j = 0; j < vectors; j++) {
      f32x16 v = load_kv<TYPE>(row, j * LANES);
      if (TYPE == KvType::S8) v = mul(v, splat(kv.scales[slot * kv.heads + job.head]));
      store(out + (i * vectors + j) * LANES, v);
    }
  }
}

// Scores of one query against sixteen keys: over the dimensions lane by lane, then over the lanes.
template <int V>
static inline f32x16 score_tile(const float* query, const float* keys, int dim) {
  f32x16 products[LANES];
  const int vectors = V ? V : dim / LANES;
  for (int i = 0; i < LANES; i++) {
    const float* key = keys + i * dim;
    f32x16 p = mul(load(query), load(key));
    for (int j = 1; j < vectors; j++) p = fma(load(query + j * LANES), load(key + j * LANES), p);
    products[i] = p;
  }
  return sum_each(products);
}

// The same scores from keys with their dimensions outermost, for Q queries at once: every lane of
// a vector is a key, so that the lanes of score_tile are vectors here. P is the part of the tree
// of sums that begins at dimension `lane`, every STEP-th; the tree is that of `sum`.
template <int V, int Q, int STEP>
static inline void score_part(const float* const* query, const float* columns, int dim, int lane,
                              f32x16* out) {
  if constexpr (STEP == LANES) {
    const int vectors = V ? V : dim / LANES;
    for (int j = 0; j < vectors; j++) {
      const int d = j * LANES + lane;
      const f32x16 key = load(columns + d * LANES);
      for (int q = 0; q < Q; q++)
        out[q] = j ? fma(splat(query[q][d]), key, out[q]) : mul(splat(query[q][d]), key);
    }
  } else {
    f32x16 later[Q];
    score_part<V, Q, 2 * STEP>(query, columns, dim, lane, out);
    score_part<V, Q, 2 * STEP>(query, columns, dim, lane + STEP, later);
    for (int q = 0; q < Q; q++) out[q] = add(out[q], later[q]);
  }
}

// sums [dim] += Σ weights[i] · value i, for Q queries at once.
template <int V, int Q>
static inline void add_values(const float* const* weights, const float* values, int dim,
                              float* const* sums) {
  const int vectors = V ? V : dim / LANES;
  constexpr int AT_ONCE = V && V <= 4 ? V : 4;
  for (int from = 0; from < vectors; from += AT_ONCE) {
    const int n = V && V <= 4 ? V : vectors - from < AT_ONCE ? vectors - from : AT_ONCE;
    f32x16 total[Q][AT_ONCE];
    for (int q = 0; q < Q; q++)
      for (int j = 0; j < n; j++) total[q][j] = load(sums[q] + (from + j) * LANES);
    for (int i = 0; i < LANES; i++) {
      const float* value = values + i * dim + from * LANES;
      for (int q = 0; q < Q; q++) {
        const f32x16 weight = splat(weights[q][i]);
        for (int j = 0; j < n; j++) total[q][j] = fma(weight, load(value + j * LANES), total[q][j]);
      }
    }
    for (int q = 0; q < Q; q++)
      for (int j = 0; j < n; j++) store(sums[q] + (from + j) * LANES, total[q][j]);
  }
}

static inline f32x16 soft_capped(f32x16 score, float cap) {
  // cap · tanh(score / cap), tanh(y) = 1 - 2 / (e^2y + 1)
  const f32x16 e = exponential(mul(score, splat(2.0f / cap)));
  const f32x16 t = sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
  return mul(t, splat(cap));
}

static void merge(Softmax& into, const Softmax& later, int dim) {
  if (later.total == 0.0f && later.peak == -INFINITY) return;  // it saw no key
  const float peak = into.peak > later.peak ? into.peak : later.peak;
  const float a = decay_of(into.peak - peak), b = decay_of(later.peak - peak);
  into.peak = peak;
  into.total = std::fma(into.total, a, later.total * b);
  for (int i = 0; i < dim; i += LANES) {
    const f32x16 scaled = mul(load(later.sums + i), splat(b));
    store(into.sums + i, fma(load(into.sums + i), splat(a), scaled));
  }
}

constexpr int WORTH_TRANSPOSING = 8;  // queries from which on turning a tile of keys pays

template <KvType TYPE, int V>
static void attend_chunk(AttendJob& job) {
  const int dim = job.keys.dim, padded = (job.count + LANES - 1) / LANES * LANES;
  float* tile = job.scratch;                   // [LANES][dim]
  float* columns = tile + LANES * dim;         // [dim][LANES]
  float* scores = columns + LANES * dim;       // [queries][CHUNK]
  float* sums = scores + MAX_QUERIES * CHUNK;  // [queries][dim]

  for (int from = 0; from < padded; from += LANES) {
    load_tile<TYPE, V>(job, job.keys, from, tile);
    int q = 0;
    if (job.queries >= WORTH_TRANSPOSING) {
      for (int d = 0; d < dim; d += LANES) transpose(tile + d, dim, columns + d * LANES);
      f32x16 score[QUERIES];
      for (; q + QUERIES <= job.queries; q += QUERIES) {
        score_part<V, QUERIES, 1>(job.query + q, columns, dim, 0, score);
        for (int i = 0; i < QUERIES; i++) store(scores + (q + i) * CHUNK + from, score[i]);
      }
    }
    for (; q < job.queries; q++)
      store(scores + q * CHUNK + from, score_tile<V>(job.query[q], tile, dim));
  }

  Softmax own[MAX_QUERIES];
  for (int q = 0; q < job.queries; q++) {
    float* row = scores + q * CHUNK;
    f32x16 peaks = splat(-INFINITY), totals = zero();
    if (job.soft_cap > 0)
      for (int i = 0; i < padded; i += LANES)
        store(row + i, soft_capped(load(row + i), job.soft_cap));
    for (int i = 0; i < job.first[q] && i < padded; i++) row[i] = -INFINITY;
    for (int i = job.end[q] > 0 ? job.end[q] : 0; i < padded; i++) row[i] = -INFINITY;
    for (int i = 0; i < padded; i += LANES) peaks = max(peaks, load(row + i));
    const float peak = largest(peaks);
    const bool none = job.first[q] >= job.end[q];
    for (int i = 0; i < padded; i += LANES) {
      const f32x16 weight = none ? zero() : decay(sub(load(row + i), splat(peak)));
      totals = add(totals, weight);
      store(row + i, weight);
    }
    own[q] = {none ? -INFINITY : peak, sum(totals), sums + q * dim};
    for (int i = 0; i < dim; i += LANES) store(own[q].sums + i, zero());
  }

  for (int from = 0; from < padded; from += LANES) {
    load_tile<TYPE, V>(job, job.values, from, tile);
    int q = 0;
    const float* weights[MAX_QUERIES];
    float* into[MAX_QUERIES];
    for (int i = 0; i < job.queries; i++) {
      weights[i] = scores + i * CHUNK + from;
      into[i] = own[i].sums;
    }
    for (; q + QUERIES <= job.queries; q += QUERIES)
      add_values<V, QUERIES>(weights + q, tile, dim, into + q);
    if (QUERIES > 1 && q + 3 == job.queries) {
      add_values<V, 3>(weights + q, tile, dim, into + q);
      q += 3;
    }
    if (QUERIES > 1 && q + 2 <= job.queries) {
      add_values<V, 2>(weights + q, tile, dim, into + q);
      q += 2;
    }
    if (q < job.queries) add_values<V, 1>(weights + q, tile, dim, into + q);
  }
  for (int q = 0; q < job.queries; q++) merge(*job.state[q], own[q], dim);
}

template <KvType TYPE>
static void attend_type(AttendJob& job) {
  switch (job.keys.dim) {
    case 64: return attend_chunk<TYPE, 4>(job);
    case 96: return attend_chunk<TYPE, 6>(job);
    case 128: return attend_chunk<TYPE, 8>(job);
    default: return attend_chunk<TYPE, 0>(job);
  }
}

static void attend(AttendJob& job) {
  switch (job.keys.type) {
    case KvType::F32: return attend_type<KvType::F32>(job);
    case KvType::F16: return attend_type<KvType::F16>(job);
    case KvType::BF16: return attend_type<KvType::BF16>(job);
    case KvType::S8: return attend_type<KvType::S8>(job);
  }
}

}  // namespace PHLOEM_ISA

#define PHLOEM_JOIN(a, b) a##b
#define PHLOEM_TABLE(isa) PHLOEM_JOIN(isa, _kernels)
#define PHLOEM_TEXT_OF(x) #x
#define PHLOEM_TEXT(x) PHLOEM_TEXT_OF(x)

const Kernels PHLOEM_TABLE(PHLOEM_ISA) = {
    PHLOEM_TEXT(PHLOEM_ISA),    PHLOEM_ISA::quantize,   PHLOEM_ISA::rms_norm,
    PHLOEM_ISA::gemm,           PHLOEM_ISA::silu_and_mul, PHLOEM_ISA::accumulate,
    PHLOEM_ISA::rotate,         PHLOEM_ISA::store_kv,   PHLOEM_ISA::attend,
    PHLOEM_ISA::merge,
};

}  // namespace phloem
