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

}  // namespace PHLOEM_ISA
}  // namespace phloem
