// Sixteen lanes in plain C++: correct everywhere, vectorised by whatever compiler there is (NEON).
//
// The vector headers (generic, avx2, avx512) define the same names, and every operation gives the
// same bits in each of them: fused multiply-add where it says `fma`, one rounding each, and sums
// over lanes in one fixed order. A kernel written in these words gives equal results on every CPU.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace phloem {
namespace PHLOEM_ISA {

struct f32x16 {
  float lane[16];
};
struct i32x16 {
  int32_t lane[16];
};
struct u8x64 {
  uint8_t lane[64];
};

#define EACH_LANE for (int i = 0; i < 16; i++)

static inline f32x16 zero() { return f32x16{}; }
static inline f32x16 splat(float x) {
  f32x16 r;
  EACH_LANE r.lane[i] = x;
  return r;
}
static inline f32x16 load(const float* p) {
  f32x16 r;
  std::memcpy(r.lane, p, sizeof r.lane);
  return r;
}
static inline void store(float* p, f32x16 a) { std::memcpy(p, a.lane, sizeof a.lane); }
static inline f32x16 add(f32x16 a, f32x16 b) {
  EACH_LANE a.lane[i] += b.lane[i];
  return a;
}
static inline f32x16 sub(f32x16 a, f32x16 b) {
  EACH_LANE a.lane[i] -= b.lane[i];
  return a;
}
static inline f32x16 mul(f32x16 a, f32x16 b) {
  EACH_LANE a.lane[i] *= b.lane[i];
  return a;
}
static inline f32x16 div(f32x16 a, f32x16 b) {
  EACH_LANE a.lane[i] /= b.lane[i];
  return a;
}
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  EACH_LANE c.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}
static inline f32x16 max(f32x16 a, f32x16 b) {
  EACH_LANE a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
static inline f32x16 min(f32x16 a, f32x16 b) {
  EACH_LANE a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
// `a`, but zero in lanes where x < y. Not-a-number is never less: it stays visible.
static inline f32x16 zero_if_less(f32x16 x, f32x16 y, f32x16 a) {
  EACH_LANE a.lane[i] = x.lane[i] < y.lane[i] ? 0.0f : a.lane[i];
  return a;
}
static inline f32x16 round(f32x16 a) {
  EACH_LANE a.lane[i] = std::nearbyintf(a.lane[i]);
  return a;
}
// x · 2^n for whole n in [-126, 127]; x is not a number where n is none.
static inline f32x16 times_power(f32x16 x, f32x16 n) {
  EACH_LANE {
    const int32_t power = n.lane[i] == n.lane[i] ? static_cast<int32_t>(n.lane[i]) : 0;
    x.lane[i] *= bits_to_float(static_cast<uint32_t>(power + 127) << 23);
  }
  return x;
}
static inline f32x16 load_f16(const uint16_t* p) {
  f32x16 r;
  EACH_LANE r.lane[i] = half_to_float(p[i]);
  return r;
}
static inline void store_f16(uint16_t* p, f32x16 a) {
  EACH_LANE p[i] = float_to_half(a.lane[i]);
}
static inline f32x16 load_bf16(const uint16_t* p) {
  f32x16 r;
  EACH_LANE r.lane[i] = bfloat_to_float(p[i]);
  return r;
}
static inline void store_bf16(uint16_t* p, f32x16 a) {
  EACH_LANE p[i] = float_to_bfloat(a.lane[i]);
}
static inline f32x16 load_s8(const int8_t* p) {
  f32x16 r;
  EACH_LANE r.lane[i] = p[i];
  return r;
}
// Whole numbers in [-128, 127].
static inline void store_s8(int8_t* p, f32x16 a) {
  // Not-a-number has no code; the scale beside it tells.
  EACH_LANE p[i] =
      a.lane[i] >= -128 && a.lane[i] <= 127 ? static_cast<int8_t>(a.lane[i]) : int8_t{0};
}

// Sums and maxima over lanes: i with i + 8, then + 4, + 2, + 1.
static inline float sum(f32x16 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.lane[i] += a.lane[i + half];
  return a.lane[0];
}
static inline float largest(f32x16 a) {
  float r = a.lane[0];
  EACH_LANE r = a.lane[i] > r ? a.lane[i] : r;
  return r;
}
// The largest magnitude; not-a-number counts as the largest of all.
static inline float largest_magnitude(f32x16 a) {
  uint32_t r = 0;
  EACH_LANE {
    const uint32_t bits = float_to_bits(a.lane[i]) & 0x7FFFFFFF;
    r = bits > r ? bits : r;
  }
  return bits_to_float(r);
}
static inline f32x16 larger_magnitudes(f32x16 a, f32x16 b) {
  EACH_LANE {
    const uint32_t x = float_to_bits(a.lane[i]) & 0x7FFFFFFF;
    const uint32_t y = float_to_bits(b.lane[i]) & 0x7FFFFFFF;
    a.lane[i] = bits_to_float(x > y ? x : y);
  }
  return a;
}
// Lane i of the result is sum(v[i]).
static inline f32x16 sum_each(const f32x16* v) {
  f32x16 r;
  EACH_LANE r.lane[i] = sum(v[i]);
  return r;
}

// out[column][row] = in[row · stride + column], sixteen of each.
static inline void transpose(const float* in, int stride, float* out) {
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 16; column++) out[column * 16 + row] = in[row * stride + column];
}

static inline i32x16 splat_i32(int32_t x) {
  i32x16 r;
  EACH_LANE r.lane[i] = x;
  return r;
}
static inline f32x16 to_float(i32x16 a) {
  f32x16 r;
  EACH_LANE r.lane[i] = static_cast<float>(a.lane[i]);
  return r;
}
static inline u8x64 load_codes(const uint8_t* p) {
  u8x64 r;
  std::memcpy(r.lane, p, sizeof r.lane);
  return r;
}
static inline u8x64 low_nibbles(u8x64 a) {
  for (int i = 0; i < 64; i++) a.lane[i] &= 15;
  return a;
}
static inline u8x64 high_nibbles(u8x64 a) {
  for (int i = 0; i < 64; i++) a.lane[i] >>= 4;
  return a;
}

struct x4 {
  int8_t value[4];
};
static inline x4 load_x4(const int8_t* p) {
  x4 r;
  std::memcpy(r.value, p, 4);
  return r;
}
// acc[lane] += Σ_j codes[4·lane + j] · x[j], codes in 0..15.
static inline i32x16 dot_u4(i32x16 acc, u8x64 codes, x4 x) {
  EACH_LANE for (int j = 0; j < 4; j++) acc.lane[i] += codes.lane[4 * i + j] * x.value[j];
  return acc;
}
// The same for codes that stand for code - 128; the accumulator starts from s8_start(Σ x).
static inline i32x16 dot_s8(i32x16 acc, u8x64 codes, x4 x) { return dot_u4(acc, codes, x); }
static inline i32x16 s8_start(int32_t sum_x) { return splat_i32(-128 * sum_x); }

#undef EACH_LANE

constexpr int ROWS_INT = 4;    // rows of a tile in integer products
constexpr int ROWS_PAIRED = 0;  // the same against two blocks at once; 0: one is as good
constexpr int ROWS_FLOAT = 2;  // and in float products
constexpr int QUERIES = 1;     // queries that attention has in registers together

}  // namespace PHLOEM_ISA
}  // namespace phloem
