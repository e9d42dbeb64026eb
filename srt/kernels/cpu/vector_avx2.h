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
static inline __m256i load_32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
static inline void store_32(uint8_t* p, __m256i v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}
static inline i32x16 load_i32(const uint8_t* p) { return {load_32(p), load_32(p + 32)}; }
struct s8_codes {
  __m256i a, b;
};
static inline s8_codes load_s8_codes(const uint8_t* p) { return {load_32(p), load_32(p + 32)}; }

// The codes of two of a quarter's four outputs for 32 columns, sixteen bytes of each.
struct NibbleCodes {
  __m256i first, second;  // columns 0 to 15, and 16 to 31
  NibbleCodes(const uint8_t* nibbles, const uint8_t* terms, int half) {
    const __m256i table = code_table(terms, 2 * half), low = _mm256_set1_epi8(15);
    const __m256i pairs = load_32(nibbles + 32 * half);
    first = _mm256_shuffle_epi8(table, _mm256_and_si256(pairs, low));
    second = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low));
  }

 private:
  // In each half the codes of an output's nibbles 0 to 15.
  static __m256i code_table(const uint8_t* terms, int output) {
    const __m256i all = _mm256_broadcastsi128_si256(load_16(terms));
    const __m256i factor = _mm256_shuffle_epi8(all, words_of(output));
    const __m256i offset = _mm256_shuffle_epi8(all, words_of(4 + output));
    const __m256i ones = _mm256_broadcastsi128_si256(_mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i more = _mm256_broadcastsi128_si256(_mm_setr_epi16(8, 9, 10, 11, 12, 13, 14, 15));
    return _mm256_packs_epi16(eight(factor, ones, offset), eight(factor, more, offset));
  }
  // Picks word `first` for one half, the next for the other.
  static __m256i words_of(int first) {
    const int pick = 0x01000100 + first * 0x02020202, next = pick + 0x02020202;
    return _mm256_setr_epi32(pick, pick, pick, pick, next, next, next, next);
  }
  static __m256i eight(__m256i factor, __m256i nibble, __m256i offset) {
    return _mm256_srai_epi16(_mm256_add_epi16(_mm256_mullo_epi16(factor, nibble), offset), 8);
  }
};

// Four vectors with four dwords of two outputs each → dword i of all eight, for each i.
static inline void store_turned(const __m256i* in, uint8_t* out) {
  const __m256i low01 = _mm256_unpacklo_epi32(in[0], in[1]);
  const __m256i high01 = _mm256_unpackhi_epi32(in[0], in[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(in[2], in[3]);
  const __m256i high23 = _mm256_unpackhi_epi32(in[2], in[3]);
  store_32(out, _mm256_unpacklo_epi64(low01, low23));
  store_32(out + 64, _mm256_unpackhi_epi64(low01, low23));
  store_32(out + 128, _mm256_unpacklo_epi64(high01, high23));
  store_32(out + 192, _mm256_unpackhi_epi64(high01, high23));
}

static inline void unpack_group(const uint8_t* const* nibbles, const uint8_t* const* terms,
                                uint8_t* out) {
  for (int half = 0; half < 2; half++, out += 32) {
    __m256i first[4], second[4];
    for (int q = 0; q < 4; q++) {
      const NibbleCodes codes(nibbles[q], terms[q], half);
      first[q] = codes.first;
      second[q] = codes.second;
    }
    store_turned(first, out);
    store_turned(second, out + 256);
  }
}

#ifdef PHLOEM_VNNI
// A row's code is 256 · high + low - 16384: two planes of unsigned bytes.
struct code_sums {
  i32x16 high, low;
};
struct row_run {
  __m256i high, low;
};
static inline code_sums no_sums() { return {splat_i32(0), splat_i32(0)}; }
static inline __m256i four_bytes(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
static inline row_run load_run(const uint8_t* planes, int run) {
  return {four_bytes(planes + 4 * run), four_bytes(planes + PLANE + 4 * run)};
}
static inline code_sums dot(code_sums acc, s8_codes w, row_run x) {
  return {{_mm256_dpbusd_avx_epi32(acc.high.a, x.high, w.a),
           _mm256_dpbusd_avx_epi32(acc.high.b, x.high, w.b)},
          {_mm256_dpbusd_avx_epi32(acc.low.a, x.low, w.a),
           _mm256_dpbusd_avx_epi32(acc.low.b, x.low, w.b)}};
}
static inline __m256i whole_8(__m256i high, __m256i low, __m256i of_codes) {
  const __m256i both = _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
  return _mm256_sub_epi32(both, _mm256_slli_epi32(of_codes, 14));
}
static inline i32x16 whole_sums(code_sums acc, i32x16 of_codes) {
  return {whole_8(acc.high.a, acc.low.a, of_codes.a), whole_8(acc.high.b, acc.low.b, of_codes.b)};
}
// Sixteen numbers in [0, 255] as bytes.
static inline void store_bytes(uint8_t* p, __m256i a, __m256i b) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(words),
                                    _mm256_extracti128_si256(words, 1)));
}
static inline void store_planes(uint8_t* planes, const f32x16* codes) {
  const __m256i zero = _mm256_set1_epi32(16384), low = _mm256_set1_epi32(255);
  for (int i = 0; i < 4; i++, planes += 16) {
    const __m256i a = _mm256_add_epi32(_mm256_cvtps_epi32(codes[i].a), zero);
    const __m256i b = _mm256_add_epi32(_mm256_cvtps_epi32(codes[i].b), zero);
    store_bytes(planes, _mm256_and_si256(_mm256_srli_epi32(a, 8), low),
                _mm256_and_si256(_mm256_srli_epi32(b, 8), low));
    store_bytes(planes + PLANE, _mm256_and_si256(a, low), _mm256_and_si256(b, low));
  }
}
#else
// Of four lanes each, pairs of columns apart.
struct code_sums {
  __m256i fours[4];
};
using row_run = __m256i;
static inline code_sums no_sums() {
  const __m256i none = _mm256_setzero_si256();
  return {{none, none, none, none}};
}
static inline row_run load_run(const uint8_t* planes, int run) {
  int64_t four;
  std::memcpy(&four, planes + run / 8 * PLANE + run % 8 * 8, 8);
  return _mm256_set1_epi64x(four);
}
static inline __m256i add_words(__m256i acc, __m128i w, __m256i x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_cvtepi8_epi16(w), x));
}
static inline code_sums dot(code_sums acc, s8_codes w, row_run x) {
  return {{add_words(acc.fours[0], _mm256_castsi256_si128(w.a), x),
           add_words(acc.fours[1], _mm256_extracti128_si256(w.a, 1), x),
           add_words(acc.fours[2], _mm256_castsi256_si128(w.b), x),
           add_words(acc.fours[3], _mm256_extracti128_si256(w.b, 1), x)}};
}
static inline __m256i add_neighbours(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xD8);
}
static inline i32x16 whole_sums(code_sums acc, i32x16) {
  return {add_neighbours(acc.fours[0], acc.fours[1]), add_neighbours(acc.fours[2], acc.fours[3])};
}
static inline void store_planes(uint8_t* planes, const f32x16* codes) {
  for (int i = 0; i < 4; i++) {
    const __m256i words =
        _mm256_packs_epi32(_mm256_cvtps_epi32(codes[i].a), _mm256_cvtps_epi32(codes[i].b));
    store_32(planes + i / 2 * PLANE + i % 2 * 32, _mm256_permute4x64_epi64(words, 0xD8));
  }
}
#endif

constexpr int SPAN_ROWS = 2;
constexpr int ROWS_FLOAT = 2;
constexpr int QUERIES = 1;

}  // namespace PHLOEM_ISA
}  // namespace phloem
