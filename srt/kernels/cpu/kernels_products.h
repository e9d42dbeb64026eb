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

}  // namespace PHLOEM_ISA
}  // namespace phloem
