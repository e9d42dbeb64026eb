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

// From values to codes in [-127, 127], and back by `scale`, given the largest magnitudes of sixteen
// groups. Not-a-number and infinity are the largest of all, so they end up in the scale.
struct Coders {
  float scale[LANES];
  explicit Coders(f32x16 peaks) {
    // A power of two, nearly always one, that keeps the inverse of the smallest peaks finite.
    const f32x16 whole = splat(0x1p60f);
    const f32x16 up = max(splat(1.0f), sub(whole, zero_if_less(peaks, splat(0x1p-100f), whole)));
    const f32x16 inverse = div(splat(127.0f), mul(peaks, up));
    store(scale, div(peaks, splat(127.0f)));
    store(lift_, up);
    store(factor_, zero_if_less(peaks, splat(0x1p-149f), inverse));
  }
  f32x16 encode(int group, const f32x16& x) const {
    return round(mul(mul(x, splat(lift_[group])), splat(factor_[group])));
  }

 private:
  float lift_[LANES], factor_[LANES];
};

// What is kept beside the codes of a group; their sums come as float32, which has them exactly.
static inline void note(const QuantizedRow& out, int g, float scale, float first, float second) {
  // A sum of what is not a number is multiplied by a scale that is none.
  out.half_sum[2 * g] = first == first ? static_cast<int32_t>(first) : 0;
  out.half_sum[2 * g + 1] = second == second ? static_cast<int32_t>(second) : 0;
  out.sum[g] = out.half_sum[2 * g] + out.half_sum[2 * g + 1];
  out.scale[g] = scale;
  out.scaled_sum[g] = scale * static_cast<float>(out.sum[g]);
}

static inline void quantize_one(const float* x, const QuantizedRow& out) {
  const f32x16 a = load(x), b = load(x + LANES);
  const Coders coders(splat(largest_magnitude(larger_magnitudes(a, b))));
  const f32x16 first = coders.encode(0, a), second = coders.encode(0, b);
  store_s8(out.q, first);
  store_s8(out.q + LANES, second);
  note(out, 0, coders.scale[0], sum(first), sum(second));
}

// n groups, up to sixteen. Maxima and sums are taken over vectors of one lane a group: what is
// kept in memory meanwhile is read as it was written, or else would have to be waited for.
static inline void quantize_groups(const float* x, int n, const QuantizedRow& out) {
  float rows[2][LANES][LANES] = {}, turned[LANES][LANES];
  for (int i = 0; i < n; i++)
    store(rows[0][i], larger_magnitudes(load(x + i * GROUP), load(x + i * GROUP + LANES)));
  transpose(rows[0][0], LANES, turned[0]);
  f32x16 peaks = load(turned[0]);
  for (int i = 1; i < LANES; i++) peaks = larger_magnitudes(peaks, load(turned[i]));
  const Coders coders(peaks);
  for (int i = 0; i < n; i++)
    for (int half = 0; half < 2; half++) {
      const int at = i * GROUP + half * LANES;
      const f32x16 codes = coders.encode(i, load(x + at));
      store_s8(out.q + at, codes);
      store(rows[half][i], codes);
    }
  float sums[2][LANES];
  for (int half = 0; half < 2; half++) {
    transpose(rows[half][0], LANES, turned[0]);
    f32x16 total = load(turned[0]);
    for (int i = 1; i < LANES; i++) total = add(total, load(turned[i]));
    store(sums[half], total);
  }
  for (int i = 0; i < n; i++) note(out, i, coders.scale[i], sums[0][i], sums[1][i]);
}

static void quantize(const float* x, int columns, const QuantizedRow& out) {
  const int whole = columns / GROUP;
  int g = 0;
  for (; g + 8 <= whole; g += LANES)
    quantize_groups(x + g * GROUP, whole - g < LANES ? whole - g : LANES, out.from(g));
  for (; g < whole; g++) quantize_one(x + g * GROUP, out.from(g));
  if (whole * GROUP == columns) return;
  float last[GROUP] = {};
  const size_t left = static_cast<size_t>(columns - whole * GROUP);
  std::memcpy(last, x + whole * GROUP, sizeof(float) * left);
  quantize_one(last, out.from(whole));
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
