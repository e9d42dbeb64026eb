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

// From values to codes in [-127, 127], and back by `scale`, given the largest magnitude.
// Not-a-number and infinity are the largest of all, so they end up in the scale.
struct Coder {
  float scale;
  explicit Coder(float peak) : scale(peak / 127.0f) {
    // A power of two, nearly always one, that keeps the inverse of the smallest peaks finite.
    const float up = peak < 0x1p-100f ? 0x1p60f : 1.0f;
    lift = splat(up);
    factor = splat(peak > 0 ? 127.0f / (peak * up) : 0.0f);
  }
  void encode(const f32x16& x, int8_t* codes) const {
    store_s8(codes, round(mul(mul(x, lift), factor)));
  }

 private:
  f32x16 lift, factor;
};

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
    const Coder coder(largest_magnitude(larger_magnitudes(a, b)));
    coder.encode(a, out.q + g * GROUP);
    coder.encode(b, out.q + g * GROUP + LANES);
    int32_t first, second;
    sum_codes(out.q + g * GROUP, first, second);
    out.scale[g] = coder.scale;
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

}  // namespace PHLOEM_ISA
}  // namespace phloem
