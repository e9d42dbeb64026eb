// Products of rows with a repacked matrix: integer codes, then floats.
namespace phloem {
namespace PHLOEM_ISA {

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
  static const uint8_t* codes(const uint8_t* block, int g, int part) {
    return record(block, g) + static_cast<size_t>(g % 2) * CODES + part * PART * LANES;
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

// R rows of x against B blocks. Per group: the products of codes, exactly, in int32; then two
// roundings, one for the scaled products and one for the minima.
template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE, int R, int B>
static inline void integer_tile(const Matrix& w, const uint8_t* block, const QuantizedRow* x,
                                Fetch fetch, float* const* out) {
  using Layout = IntegerLayout<KIND, SCALE_GROUP, MIN, WIDE>;
  constexpr int PART = Layout::PART, PARTS = Layout::PARTS;
  const int groups = w.groups();
  const size_t next = w.stride();
  f32x16 total[R][B];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) total[r][b] = zero();
  for (int g = 0; g < groups; g++) {
    fetch(g);
    for (int part = 0; part < PARTS; part++) {
      i32x16 products[R][B];
      for (int r = 0; r < R; r++) {
        const int32_t sum_x = PARTS == 1 ? x[r].sum[g] : x[r].half_sum[2 * g + part];
        for (int b = 0; b < B; b++)
          products[r][b] = KIND == Kind::S8 ? s8_start(sum_x) : splat_i32(MIN ? 0 : -8 * sum_x);
      }
      const int first = g * GROUP + part * PART;
      const uint8_t* codes = Layout::codes(block, g, part);
      for (int j = 0; j < (KIND == Kind::U4 ? 4 : PART / 4); j++, codes += 64) {
        u8x64 run[B], low[B], high[B];
        for (int b = 0; b < B; b++) {
          run[b] = load_codes(codes + b * next);
          if (KIND == Kind::U4) {
            low[b] = low_nibbles(run[b]);
            high[b] = high_nibbles(run[b]);
          }
        }
        for (int r = 0; r < R; r++) {
          const int8_t* columns = x[r].q + first + 4 * j;
          const x4 here = load_x4(columns);
          if (KIND == Kind::U4) {
            const x4 later = load_x4(columns + 16);
            for (int b = 0; b < B; b++) products[r][b] = dot_u4(products[r][b], low[b], here);
            for (int b = 0; b < B; b++) products[r][b] = dot_u4(products[r][b], high[b], later);
          } else {
            for (int b = 0; b < B; b++) products[r][b] = dot_s8(products[r][b], run[b], here);
          }
        }
      }
      if (SCALE_GROUP == 0) {
        for (int r = 0; r < R; r++)
          for (int b = 0; b < B; b++)
            total[r][b] = fma(to_float(products[r][b]), splat(x[r].scale[g]), total[r][b]);
        continue;
      }
      for (int b = 0; b < B; b++) {
        const f32x16 scale = load_scale<WIDE>(Layout::scales(block + b * next, g, part));
        for (int r = 0; r < R; r++) {
          const f32x16 both = mul(scale, splat(x[r].scale[g]));
          total[r][b] = fma(to_float(products[r][b]), both, total[r][b]);
        }
      }
      if (MIN)
        for (int b = 0; b < B; b++) {
          const f32x16 minimum = load_scale<WIDE>(Layout::minima(block + b * next, g));
          for (int r = 0; r < R; r++)
            total[r][b] = fma(minimum, splat(x[r].scaled_sum[g]), total[r][b]);
        }
    }
  }
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) {
      if (SCALE_GROUP == 0)
        total[r][b] = mul(total[r][b], load_scale<WIDE>(Layout::row_scales(w, block + b * next)));
      store(out[r] + b * LANES, total[r][b]);
    }
}

// Rows [0, many) against B blocks, as many at once as the tiles have.
template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE, int B>
static inline void integer_blocks(const Matrix& w, const uint8_t* block, const QuantizedRow* row,
                                  int many, float* const* target) {
  const size_t each = B * w.stride() / static_cast<size_t>(many);  // of the next blocks, for a row
  const size_t groups = static_cast<size_t>(w.groups());
  const auto fetch = [&](int i, int n) {
    return Fetch{block + B * w.stride() + i * each, (n * each + 64) / groups};
  };
  constexpr int MOST = B == 1 ? ROWS_INT : ROWS_PAIRED;
  int i = 0;
#define PHLOEM_ROWS(R) \
  integer_tile<KIND, SCALE_GROUP, MIN, WIDE, R, B>(w, block, row + i, fetch(i, R), target + i), i += R
  // Eight are better passed as four and four than as six and two.
  while (i + MOST <= many && !(MOST == 6 && i + 8 == many)) PHLOEM_ROWS(MOST);
  while (i + 4 <= many) PHLOEM_ROWS(4);
  while (i + 2 <= many) PHLOEM_ROWS(2);
  if (i < many) PHLOEM_ROWS(1);
#undef PHLOEM_ROWS
}

constexpr int MANY = 64;  // rows whose descriptions are at hand while all blocks pass

// Rows [from, count); see `Kernels::gemm`.
template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE>
static void integer_gemm(const Matrix& w, int begin, int end, const Activations& x,
                         const int* rows, int from, int count, float* out, ptrdiff_t stride) {
  for (; from < count; from += MANY) {
    const int many = count - from < MANY ? count - from : MANY;
    QuantizedRow row[MANY];
    for (int i = 0; i < many; i++) row[i] = x.quantized(rows ? rows[from + i] : from + i);
    float* target[MANY];
    for (int i = 0; i < many; i++) target[i] = out + (from + i) * stride;
    int b = begin;
    const auto pass = [&](int blocks) {
      b += blocks;
      for (int i = 0; i < many; i++) target[i] += blocks * LANES;
    };
    if constexpr (ROWS_PAIRED > 0)
      for (; many > 1 && b + 2 <= end; pass(2))
        integer_blocks<KIND, SCALE_GROUP, MIN, WIDE, 2>(w, w.block(b), row, many, target);
    for (; b < end; pass(1))
      integer_blocks<KIND, SCALE_GROUP, MIN, WIDE, 1>(w, w.block(b), row, many, target);
  }
}

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
                       int from, int count, float* out, ptrdiff_t stride) {
  constexpr int MANY = 32;
  for (; from < count; from += MANY) {
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

}  // namespace PHLOEM_ISA
}  // namespace phloem
