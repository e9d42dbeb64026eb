// Sixteen lanes as one AVX-512 register; the words are explained in vector_generic.h.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "vector_x86.h"

namespace phloem {
namespace PHLOEM_ISA {

using f32x16 = __m512;
using i32x16 = __m512i;
using u8x64 = __m512i;

static inline f32x16 zero() { return _mm512_setzero_ps(); }
static inline f32x16 splat(float x) { return _mm512_set1_ps(x); }
static inline f32x16 load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, f32x16 v) { _mm512_storeu_ps(p, v); }
static inline f32x16 add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
static inline f32x16 sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
static inline f32x16 mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
static inline f32x16 div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
static inline f32x16 abs(f32x16 a) { return _mm512_abs_ps(a); }
static inline f32x16 min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
static inline f32x16 zero_if_less(f32x16 x, f32x16 y, f32x16 v) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, y, _CMP_NLT_UQ), v);
}
static inline f32x16 round(f32x16 a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline f32x16 times_power(f32x16 x, f32x16 n) { return _mm512_scalef_ps(x, n); }

static inline __m256i load_32(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
static inline void store_32(void* p, __m256i v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), v);
}
static inline f32x16 load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_32(p)); }
static inline void store_f16(uint16_t* p, f32x16 v) {
  store_32(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline f32x16 load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32(p)), 16));
}
static inline void store_bf16(uint16_t* p, f32x16 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  store_32(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
}
static inline f32x16 load_s8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
static inline void store_s8(int8_t* p, f32x16 v) {
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

static inline __m256 low_half(f32x16 v) { return _mm512_castps512_ps256(v); }
static inline __m256 high_half(f32x16 v) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}
static inline float sum(f32x16 v) {
  return sum_eight(_mm256_add_ps(low_half(v), high_half(v)));
}
static inline float largest(f32x16 v) { return _mm512_reduce_max_ps(v); }

static inline f32x16 larger_magnitudes(f32x16 a, f32x16 b) {
  return _mm512_castsi512_ps(
      _mm512_max_epi32(_mm512_castps_si512(abs(a)), _mm512_castps_si512(abs(b))));
}
static inline float largest_magnitude(f32x16 v) {
  const int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(abs(v)));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
}

// Halves of the 128-bit quarters of both, added: what sum() does first, for two vectors at once.
static inline f32x16 add_eights(f32x16 a, f32x16 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}
// Quarters of a: lanes 0-3, 4-7 of one vector, then of another; b likewise.
static inline f32x16 add_fours(f32x16 a, f32x16 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
static inline f32x16 add_twos(f32x16 a, f32x16 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
}
static inline f32x16 add_ones(f32x16 a, f32x16 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}
static inline f32x16 sum_each(const f32x16* v) {
  // Which vector ends in which lane: quarter q of add_fours' result holds vector q of its four,
  // and lane l of a quarter holds the l-th of the four results that the last steps join.
  f32x16 four[4];
  for (int i = 0; i < 4; i++)
    four[i] = add_fours(add_eights(v[i], v[i + 4]), add_eights(v[i + 8], v[i + 12]));
  return add_ones(add_twos(four[0], four[1]), add_twos(four[2], four[3]));
}

// out[column][row] = lane `column` of row(i), for sixteen rows.
template <class Row>
static inline void transpose(const Row& row, float* out) {
  f32x16 a[16], b[16];
  for (int i = 0; i < 8; i++) {
    const f32x16 x = row(2 * i), y = row(2 * i + 1);
    a[2 * i] = _mm512_unpacklo_ps(x, y);
    a[2 * i + 1] = _mm512_unpackhi_ps(x, y);
  }
  // b[4i + c]: column c of each quarter, rows 4i to 4i + 3.
  for (int i = 0; i < 4; i++)
    for (int half = 0; half < 2; half++) {
      b[4 * i + 2 * half] = _mm512_shuffle_ps(a[4 * i + half], a[4 * i + 2 + half], 0x44);
      b[4 * i + 2 * half + 1] = _mm512_shuffle_ps(a[4 * i + half], a[4 * i + 2 + half], 0xEE);
    }
  for (int c = 0; c < 4; c++) {
    const f32x16 low01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x44);
    const f32x16 high01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xEE);
    const f32x16 low23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x44);
    const f32x16 high23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xEE);
    store(out + c * 16, _mm512_shuffle_f32x4(low01, low23, 0x88));
    store(out + (4 + c) * 16, _mm512_shuffle_f32x4(low01, low23, 0xDD));
    store(out + (8 + c) * 16, _mm512_shuffle_f32x4(high01, high23, 0x88));
    store(out + (12 + c) * 16, _mm512_shuffle_f32x4(high01, high23, 0xDD));
  }
}

static inline void transpose(const float* in, int stride, float* out) {
  transpose([=](int i) { return load(in + i * stride); }, out);
}

static inline i32x16 splat_i32(int32_t x) { return _mm512_set1_epi32(x); }
static inline f32x16 to_float(i32x16 v) { return _mm512_cvtepi32_ps(v); }
static inline u8x64 load_codes(const uint8_t* p) {
  return _mm512_loadu_si512(reinterpret_cast<const void*>(p));
}
static inline u8x64 low_nibbles(u8x64 c) { return _mm512_and_si512(c, _mm512_set1_epi8(15)); }
static inline u8x64 high_nibbles(u8x64 c) {
  return _mm512_and_si512(_mm512_srli_epi16(c, 4), _mm512_set1_epi8(15));
}

using x4 = __m512i;
static inline x4 load_x4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

#ifdef PHLOEM_VNNI
static inline i32x16 dot_u4(i32x16 acc, u8x64 codes, x4 x) {
  return _mm512_dpbusd_epi32(acc, codes, x);
}
static inline i32x16 dot_s8(i32x16 acc, u8x64 codes, x4 x) {
  return _mm512_dpbusd_epi32(acc, codes, x);
}
static inline i32x16 s8_start(int32_t sum_x) { return splat_i32(-128 * sum_x); }
#else
static inline __m512i add_pairs(__m512i acc, __m512i words) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(words, _mm512_set1_epi16(1)));
}
static inline i32x16 dot_u4(i32x16 acc, u8x64 codes, x4 x) {
  return add_pairs(acc, _mm512_maddubs_epi16(codes, x));
}
// vpmaddubsw saturates for full bytes, so the sign moves to x: |w| ≤ 128 and |x| ≤ 127 do not.
static inline i32x16 dot_s8(i32x16 acc, u8x64 codes, x4 x) {
  const __m512i w = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
  const __m512i turned =
      _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
  return add_pairs(acc, _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned));
}
static inline i32x16 s8_start(int32_t) { return splat_i32(0); }
#endif

constexpr int ROWS_INT = 8;
constexpr int ROWS_PAIRED = 6;
constexpr int ROWS_FLOAT = 4;
constexpr int QUERIES = 4;

}  // namespace PHLOEM_ISA
}  // namespace phloem
