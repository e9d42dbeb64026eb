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
// Numbers in [-128, 127], rounded to nearest even.
static inline void store_s8(int8_t* p, f32x16 a) {
  EACH_LANE {
    const float code = std::nearbyint(a.lane[i]);
    // Not-a-number has no code; the scale beside it tells.
    p[i] = code >= -128 && code <= 127 ? static_cast<int8_t>(code) : int8_t{0};
  }
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
static inline i32x16 load_i32(const uint8_t* p) {
  i32x16 r;
  std::memcpy(r.lane, p, sizeof r.lane);
  return r;
}

// Codes of 32 columns of 16 outputs from the nibbles and the terms of its four quarters: eight runs
// of four columns (see matrix.h).
static inline void unpack_group(const uint8_t* const* nibbles, const uint8_t* const* terms,
                                uint8_t* out) {
  EACH_LANE {
    uint16_t factor;
    int16_t offset;
    std::memcpy(&factor, terms[i % 4] + i / 4 * 2, 2);
    std::memcpy(&offset, terms[i % 4] + 8 + i / 4 * 2, 2);
    for (int k = 0; k < 16; k++) {
      const uint8_t pair = nibbles[i % 4][i / 4 * 16 + k];
      uint8_t* to = out + k / 4 * 64 + i * 4 + k % 4;
      to[0] = static_cast<uint8_t>(code_of(pair & 15, factor, offset));
      to[256] = static_cast<uint8_t>(code_of(pair >> 4, factor, offset));
    }
  }
}

// A run of four columns of 16 outputs; the same four of a row; and sums of their products. In a
// step of a row, columns 0 to 31 are in the first plane as int16, the others in the second.
struct s8_codes {
  int8_t lane[64];
};
struct row_run {
  int16_t value[4];
};
struct code_sums {
  int32_t lane[16];
};
static inline code_sums no_sums() { return code_sums{}; }
static inline s8_codes load_s8_codes(const uint8_t* p) {
  s8_codes r;
  std::memcpy(r.lane, p, sizeof r.lane);
  return r;
}
static inline row_run load_run(const uint8_t* planes, int run) {
  row_run r;
  std::memcpy(r.value, planes + run / 8 * PLANE + run % 8 * 8, 8);
  return r;
}
static inline code_sums dot(code_sums acc, s8_codes w, row_run x) {
  EACH_LANE for (int j = 0; j < 4; j++) acc.lane[i] += w.lane[4 * i + j] * x.value[j];
  return acc;
}
// The sums of products; `of_codes` are those of the weights' codes alone.
static inline i32x16 whole_sums(code_sums acc, i32x16) {
  i32x16 r;
  std::memcpy(r.lane, acc.lane, sizeof r.lane);
  return r;
}
// A step's 64 codes, in [-16383, 16383], rounded to nearest even. Not-a-number has no code; the scale
// beside it tells.
static inline void store_planes(uint8_t* planes, const f32x16* codes) {
  for (int part = 0; part < 4; part++) {
    int16_t values[16];
    EACH_LANE {
      const float code = std::nearbyint(codes[part].lane[i]);
      values[i] = code >= -16383 && code <= 16383 ? static_cast<int16_t>(code) : int16_t{0};
    }
    std::memcpy(planes + part / 2 * PLANE + part % 2 * 32, values, sizeof values);
  }
}

#undef EACH_LANE

constexpr int SPAN_ROWS = 2;   // rows of a tile in integer products
constexpr int ROWS_FLOAT = 2;  // and in float products
constexpr int QUERIES = 1;     // queries that attention has in registers together

}  // namespace PHLOEM_ISA
}  // namespace phloem
