// Kernels for avx2, fma, f16c, avxvnni.
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "target.h"

PHLOEM_TARGET("avx2,fma,f16c,avxvnni")
#define PHLOEM_ISA avxvnni
#define PHLOEM_VNNI
#include "vector_avx2.h"
#include "kernels_impl.h"
PHLOEM_TARGET_END
#endif
