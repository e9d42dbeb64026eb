// Kernels for avx512f, avx512bw, avx512dq, avx512vl, avx512vnni, avx2, fma, f16c.
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "target.h"

PHLOEM_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define PHLOEM_ISA avx512vnni
#define PHLOEM_VNNI
#define PHLOEM_NIBBLE_ROWS
#include "vector_avx512.h"
#include "kernels_impl.h"
PHLOEM_TARGET_END
#endif
