// Sixteen lanes as two AVX2 registers; the words are explained in vector_generic.h.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "vector_x86.h"

namespace phloem {
namespace PHLOEM_ISA {

struct f32x16 {
  __m256 a, b;
};
struct i32x16 {
  __m256i a, b;
};
struct u8x64 {
  __m256i a, b;
};

static inline f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline f32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, f32x16 v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
static inline f32x16 add(f32x16 x, f32x16 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
static inline f32x16 sub(f32x16 x, f32x16 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
static inline f32x16 mul(f32x16 x, f32x16 y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
static inline f32x16 div(f32x16 x, f32x16 y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
static inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline f32x16 max(f32x16 x, f32x16 y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
static inline f32x16 abs(f32x16 x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
static inline f32x16 min(f32x16 x, f32x16 y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
static inline f32x16 zero_if_less(f32x16 x, f32x16 y, f32x16 v) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), v.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ), v.b)};
}
static inline f32x16 round(f32x16 x) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
static inline __m256 exp2_whole_8(__m256 n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
static inline f32x16 times_power(f32x16 x, f32x16 n) {
  return {_mm256_mul_ps(x.a, exp2_whole_8(n.a)), _mm256_mul_ps(x.b, exp2_whole_8(n.b))};
}

static inline __m128i load_16(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
static inline f32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_16(p)), _mm256_cvtph_ps(load_16(p + 8))};
}
static inline void store_f16(uint16_t* p, f32x16 v) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v.a, nearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(v.b, nearest));
}
static inline __m256 load_bf16_8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(p)), 16));
}
static inline f32x16 load_bf16(const uint16_t* p) { return {load_bf16_8(p), load_bf16_8(p + 8)}; }
static inline __m256i round_to_bf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}
static inline void store_bf16(uint16_t* p, f32x16 v) {
  const __m256i both = _mm256_packus_epi32(round_to_bf16(v.a), round_to_bf16(v.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xD8));
}
static inline f32x16 load_s8(const int8_t* p) {
  const __m128i bytes = load_16(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
static inline void store_s8(int8_t* p, f32x16 v) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

static inline float sum(f32x16 v) {
  return sum_eight(_mm256_add_ps(v.a, v.b));
}
static inline float largest(f32x16 v) {
  const __m256 eight = _mm256_max_ps(v.a, v.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline f32x16 larger_magnitudes(f32x16 x, f32x16 y) {
  x = abs(x);
  y = abs(y);
  return {_mm256_castsi256_ps(
              _mm256_max_epi32(_mm256_castps_si256(x.a), _mm256_castps_si256(y.a))),
          _mm256_castsi256_ps(
              _mm256_max_epi32(_mm256_castps_si256(x.b), _mm256_castps_si256(y.b)))};
}
static inline float largest_magnitude(f32x16 v) {
  v = abs(v);
  const __m256i eight = _mm256_max_epi32(_mm256_castps_si256(v.a), _mm256_castps_si256(v.b));
  const __m128i four =
      _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xEE));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0x55))));
}
static inline __m256 sum_each_8(const f32x16* v) {
  __m256 eight[8], four[4];
  for (int i = 0; i < 8; i++) eight[i] = _mm256_add_ps(v[i].a, v[i].b);
  // Vector i beside vector i + 4: the low halves of both plus the high halves of both.
  for (int i = 0; i < 4; i++)
    four[i] = _mm256_add_ps(_mm256_permute2f128_ps(eight[i], eight[i + 4], 0x20),
                            _mm256_permute2f128_ps(eight[i], eight[i + 4], 0x31));
  __m256 two[2];
  for (int i = 0; i < 2; i++)
    two[i] = _mm256_add_ps(_mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0x44),
                           _mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0xEE));
  return _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x88),
                       _mm256_shuffle_ps(two[0], two[1], 0xDD));
}
static inline f32x16 sum_each(const f32x16* v) { return {sum_each_8(v), sum_each_8(v + 8)}; }

static inline void transpose_8(const float* in, int stride, float* out) {
  __m256 pairs[8], quads[8];
  for (int i = 0; i < 4; i++) {
    const __m256 a = _mm256_loadu_ps(in + 2 * i * stride);
    const __m256 b = _mm256_loadu_ps(in + (2 * i + 1) * stride);
    pairs[2 * i] = _mm256_unpacklo_ps(a, b);
    pairs[2 * i + 1] = _mm256_unpackhi_ps(a, b);
  }
  for (int i = 0; i < 2; i++)
    for (int half = 0; half < 2; half++) {
      const __m256 a = pairs[4 * i + half], b = pairs[4 * i + 2 + half];
      quads[4 * i + 2 * half] = _mm256_shuffle_ps(a, b, 0x44);
      quads[4 * i + 2 * half + 1] = _mm256_shuffle_ps(a, b, 0xEE);
    }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(out + i * 16, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * 16, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31));
  }
}
static inline void transpose(const float* in, int stride, float* out) {
  transpose_8(in, stride, out);
  transpose_8(in + 8, stride, out + 8 * 16);
  transpose_8(in + 8 * stride, stride, out + 8);
  transpose_8(in + 8 * stride + 8, stride, out + 8 * 16 + 8);
}

static inline i32x16 splat_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline f32x16 to_float(i32x16 v) {
  return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)};
}
static inline u8x64 load_codes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
static inline u8x64 low_nibbles(u8x64 c) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(c.a, mask), _mm256_and_si256(c.b, mask)};
}
static inline u8x64 high_nibbles(u8x64 c) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(c.a, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(c.b, 4), mask)};
}

using x4 = __m256i;
static inline x4 load_x4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

#ifdef PHLOEM_VNNI
static inline i32x16 dot_u4(i32x16 acc, u8x64 codes, x4 x) {
  return {_mm256_dpbusd_avx_epi32(acc.a, codes.a, x), _mm256_dpbusd_avx_epi32(acc.b, codes.b, x)};
}
static inline i32x16 dot_s8(i32x16 acc, u8x64 codes, x4 x) { return dot_u4(acc, codes, x); }
static inline i32x16 s8_start(int32_t sum_x) { return splat_i32(-128 * sum_x); }
#else
static inline __m256i add_pairs(__m256i acc, __m256i words) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
static inline i32x16 dot_u4(i32x16 acc, u8x64 codes, x4 x) {
  return {add_pairs(acc.a, _mm256_maddubs_epi16(codes.a, x)),
          add_pairs(acc.b, _mm256_maddubs_epi16(codes.b, x))};
}
// vpmaddubsw saturates for full bytes, so the sign moves to x: |w| ≤ 128 and |x| ≤ 127 do not.
static inline __m256i signed_products(__m256i codes, __m256i x) {
  const __m256i w = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
  return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
static inline i32x16 dot_s8(i32x16 acc, u8x64 codes, x4 x) {
  return {add_pairs(acc.a, signed_products(codes.a, x)),
          add_pairs(acc.b, signed_products(codes.b, x))};
}
static inline i32x16 s8_start(int32_t) { return splat_i32(0); }
#endif

constexpr int ROWS_INT = 4;
constexpr int ROWS_PAIRED = 0;
constexpr int ROWS_FLOAT = 2;
constexpr int QUERIES = 1;

}  // namespace PHLOEM_ISA
}  // namespace phloem
