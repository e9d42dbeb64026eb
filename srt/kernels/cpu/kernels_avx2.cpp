// Kernels for avx2, fma, f16c.
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "target.h"

PHLOEM_TARGET("avx2,fma,f16c")
#define PHLOEM_ISA avx2
#include "vector_avx2.h"
#include "kernels_impl.h"
PHLOEM_TARGET_END
#endif
