// Kernels over the elements of a row: quantisation, norm, activation, rotation.
namespace phloem {
namespace PHLOEM_ISA {

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

// e^x to 1 unit in the last place or two, for x in [-87, 88] (Cody and Waite's reduction, and a
// minimax polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]).
static inline f32x16 exponential_within(f32x16 x) {
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
  return times_power(p, n);
}

// The same for all x, clamped to that range.
static inline f32x16 exponential(f32x16 x) {
  return exponential_within(min(splat(88.0f), max(splat(-87.0f), x)));
}

// e^x for x ≤ 0, exactly zero below -87.
static inline f32x16 decay(f32x16 x) {
  return zero_if_less(x, splat(-87.0f), exponential_within(max(splat(-87.0f), x)));
}

static inline float decay_of(float x) {
  float lanes[LANES];
  store(lanes, decay(splat(x)));
  return lanes[0];
}

// To codes in [-most, most] and, by `scale`, back, given the largest magnitude there is. Below a
// certain size nothing is told from zero any more. Not-a-number and infinity are the largest of all,
// so they end up in the scale.
class Coder {
 public:
  Coder(float peak, float most) : Coder(peak < 0x1p-113f ? 0x1p-113f : peak, most, true) {}
  // Stores of codes round to nearest even.
  f32x16 operator()(f32x16 x) const { return mul(x, splat(inverse_)); }
  const float scale;

 private:
  Coder(float peak, float most, bool) : scale(peak / most), inverse_(most / peak) {}
  const float inverse_;
};

static void quantize(const float* x, int columns, const QuantizedRow& out) {
  const auto sixteen = [&](int k) {
    return columns - k >= LANES ? load(x + k) : columns > k ? load_part(x + k, columns - k) : zero();
  };
  f32x16 peaks = zero();
  for (int k = 0; k < columns; k += LANES) peaks = larger_magnitudes(peaks, sixteen(k));
  const Coder coder(largest_magnitude(peaks), 16383);
  *out.scale = coder.scale;
  uint8_t* step = out.planes;
  for (int k = 0; k < columns; k += STEP, step += STEP_PLANES) {
    const f32x16 codes[4] = {coder(sixteen(k)), coder(sixteen(k + 16)), coder(sixteen(k + 32)),
                             coder(sixteen(k + 48))};
    store_planes(step, codes);
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

// out = x / by
static void divide(const float* x, float by, int n, float* out) {
  const f32x16 divisor = splat(by);
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, div(load(x + i), divisor));
  if (i < n) store_part(out + i, div(load_part(x + i, n - i), divisor), n - i);
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

}  // namespace PHLOEM_ISA
}  // namespace phloem
