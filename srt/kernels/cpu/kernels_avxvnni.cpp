// Kernels for avx2, fma, f16c, avxvnni.
#include "kernels.h"
#ifdef PHLOEM_HAS_AVXVNNI
#include <cmath>
#include <cstdint>
#include <cstring>

#include "target.h"

PHLOEM_TARGET("avx2,fma,f16c,avxvnni")
#define PHLOEM_ISA avxvnni
#define PHLOEM_VNNI
#include "vector_avx2.h"
#include "kernels_impl.h"
PHLOEM_TARGET_END
#endif
