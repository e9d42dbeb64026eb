// Products of rows of float32 with a matrix of floats.
namespace phloem {
namespace PHLOEM_ISA {

// Weights are fetched into the second-level cache some kilobytes before their use: far enough ahead
// for memory to answer, and over the ends of pages, where the hardware's own look-ahead stops.
constexpr size_t AHEAD = 16384;

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

}  // namespace PHLOEM_ISA
}  // namespace phloem
