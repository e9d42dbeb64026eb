// Sixteen lanes as one AVX-512 register; the words are explained in vector_generic.h.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "vector_x86.h"

namespace phloem {
namespace PHLOEM_ISA {

using f32x16 = __m512;
using i32x16 = __m512i;

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
static inline i32x16 load_i32(const uint8_t* p) {
  return _mm512_loadu_si512(reinterpret_cast<const void*>(p));
}
using s8_codes = __m512i;
static inline s8_codes load_s8_codes(const uint8_t* p) { return load_i32(p); }

// The codes of four outputs for 32 columns, sixteen bytes of each.
struct NibbleCodes {
  __m512i first, second;  // columns 0 to 15, and 16 to 31
  NibbleCodes(const uint8_t* nibbles, const uint8_t* terms) {
    const __m512i table = code_table(terms), low = _mm512_set1_epi8(15);
    const __m512i pairs = _mm512_loadu_si512(reinterpret_cast<const void*>(nibbles));
    first = _mm512_shuffle_epi8(table, _mm512_and_si512(pairs, low));
    second = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low));
  }

 private:
  // In each quarter the codes of an output's nibbles 0 to 15.
  static __m512i code_table(const uint8_t* terms) {
    const __m512i all = _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(terms)));
    const __m512i factor = _mm512_shuffle_epi8(all, words_of(0));
    const __m512i offset = _mm512_shuffle_epi8(all, words_of(4));
    const __m512i ones = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i more = _mm512_broadcast_i32x4(_mm_setr_epi16(8, 9, 10, 11, 12, 13, 14, 15));
    return _mm512_packs_epi16(eight(factor, ones, offset), eight(factor, more, offset));
  }
  // Picks word `first` + i in quarter i.
  static __m512i words_of(int first) {
    const auto pick = [&](int i) { return static_cast<int>(0x01000100 + (first + i) * 0x02020202); };
    return _mm512_setr_epi32(pick(0), pick(0), pick(0), pick(0), pick(1), pick(1), pick(1), pick(1),
                             pick(2), pick(2), pick(2), pick(2), pick(3), pick(3), pick(3), pick(3));
  }
  static __m512i eight(__m512i factor, __m512i nibble, __m512i offset) {
    return _mm512_srai_epi16(_mm512_add_epi16(_mm512_mullo_epi16(factor, nibble), offset), 8);
  }
};

// Four vectors with four dwords of four outputs each → dword i of all sixteen, for each i.
static inline void turn_fours(const __m512i* in, __m512i* out) {
  const __m512i low01 = _mm512_unpacklo_epi32(in[0], in[1]);
  const __m512i high01 = _mm512_unpackhi_epi32(in[0], in[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(in[2], in[3]);
  const __m512i high23 = _mm512_unpackhi_epi32(in[2], in[3]);
  out[0] = _mm512_unpacklo_epi64(low01, low23);
  out[1] = _mm512_unpackhi_epi64(low01, low23);
  out[2] = _mm512_unpacklo_epi64(high01, high23);
  out[3] = _mm512_unpackhi_epi64(high01, high23);
}
static inline __m512i add_fours(const __m512i* in) {
  __m512i out[4];
  turn_fours(in, out);
  return _mm512_add_epi32(_mm512_add_epi32(out[0], out[1]), _mm512_add_epi32(out[2], out[3]));
}

static inline void unpack_group(const uint8_t* const* nibbles, const uint8_t* const* terms,
                                uint8_t* out) {
  __m512i first[4], second[4], turned[4];
  for (int q = 0; q < 4; q++) {
    const NibbleCodes codes(nibbles[q], terms[q]);
    first[q] = codes.first;
    second[q] = codes.second;
  }
  turn_fours(first, turned);
  for (int i = 0; i < 4; i++) _mm512_storeu_si512(out + 64 * i, turned[i]);
  turn_fours(second, turned);
  for (int i = 0; i < 4; i++) _mm512_storeu_si512(out + 64 * (4 + i), turned[i]);
}

#ifdef PHLOEM_VNNI
// A row's code is 256 · high + low - 16384: two planes of unsigned bytes.
struct code_sums {
  __m512i high, low;
};
struct row_run {
  __m512i high, low;
};
static inline code_sums no_sums() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
static inline __m512i four_bytes(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
static inline row_run load_run(const uint8_t* planes, int run) {
  return {four_bytes(planes + 4 * run), four_bytes(planes + PLANE + 4 * run)};
}
static inline __m512i sixteen_bytes(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline row_run sixteen_columns(const uint8_t* planes) {
  return {sixteen_bytes(planes), sixteen_bytes(planes + PLANE)};
}
static inline code_sums dot(code_sums acc, s8_codes w, row_run x) {
  return {_mm512_dpbusd_epi32(acc.high, x.high, w), _mm512_dpbusd_epi32(acc.low, x.low, w)};
}
static inline i32x16 whole_sums(code_sums acc, i32x16 of_codes) {
  const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(acc.high, 8), acc.low);
  return _mm512_sub_epi32(both, _mm512_slli_epi32(of_codes, 14));
}
static inline void store_planes(uint8_t* planes, const f32x16* codes) {
  // Packing leaves the dwords of a plane turned: those of a quarter are of four vectors.
  const __m512i back = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i zero = _mm512_set1_epi16(16384), low = _mm512_set1_epi16(255);
  const auto words = [&](int i) {
    return _mm512_add_epi16(
        _mm512_packs_epi32(_mm512_cvtps_epi32(codes[i]), _mm512_cvtps_epi32(codes[i + 1])), zero);
  };
  const __m512i a = words(0), b = words(2);
  const __m512i highs = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
  const __m512i lows = _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
  _mm512_storeu_si512(planes, _mm512_permutexvar_epi32(back, highs));
  _mm512_storeu_si512(planes + PLANE, _mm512_permutexvar_epi32(back, lows));
}
#else
// Of lanes 0-7 and 8-15, pairs of columns apart.
struct code_sums {
  __m512i first, second;
};
using row_run = __m512i;
static inline code_sums no_sums() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
static inline row_run load_run(const uint8_t* planes, int run) {
  int64_t four;
  std::memcpy(&four, planes + run / 8 * PLANE + run % 8 * 8, 8);
  return _mm512_set1_epi64(four);
}
static inline __m512i add_words(__m512i acc, __m256i w, __m512i x) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_cvtepi8_epi16(w), x));
}
static inline code_sums dot(code_sums acc, s8_codes w, row_run x) {
  return {add_words(acc.first, _mm512_castsi512_si256(w), x),
          add_words(acc.second, _mm512_extracti64x4_epi64(w, 1), x)};
}
static inline i32x16 whole_sums(code_sums acc, i32x16) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_permutex2var_epi32(acc.first, even, acc.second),
                          _mm512_permutex2var_epi32(acc.first, odd, acc.second));
}
static inline void store_planes(uint8_t* planes, const f32x16* codes) {
  for (int i = 0; i < 4; i++)
    store_32(planes + i / 2 * PLANE + i % 2 * 32,
             _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(codes[i])));
}
#endif

constexpr int SPAN_ROWS = 4;
constexpr int ROWS_FLOAT = 4;
constexpr int QUERIES = 4;

}  // namespace PHLOEM_ISA
}  // namespace phloem
