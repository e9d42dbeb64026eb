// Kernels for AVX-512 with VNNI and AMX tiles.
#if defined(__x86_64__) && defined(__linux__)
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "target.h"

PHLOEM_TARGET(
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8,avx2,fma,f16c")
#define PHLOEM_ISA amx
#define PHLOEM_VNNI
#define PHLOEM_AMX
#include "vector_avx512.h"
#include "kernels_impl.h"
PHLOEM_TARGET_END
#endif
