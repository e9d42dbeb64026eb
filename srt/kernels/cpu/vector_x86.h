// What the AVX2 and the AVX-512 lanes share: work on 256 bits.
#include <immintrin.h>

#include <cstdint>

namespace phloem {
namespace PHLOEM_ISA {

// Lane i with i + 4, then + 2, + 1.
static inline float sum_eight(__m256 eight) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// Sums of the first and the second sixteen of thirty-two codes.
static inline void sum_codes(const int8_t* q, int32_t& first, int32_t& second) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
  const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  const __m128i eights =
      _mm_hadd_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
  const __m128i sums = _mm_hadd_epi32(eights, eights);
  first = _mm_cvtsi128_si32(sums);
  second = _mm_extract_epi32(sums, 1);
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
