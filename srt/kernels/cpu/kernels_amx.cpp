// Kernels for AMX (int8 and bfloat16) and what CPUs with it have: avx512f, avx512bw, avx512dq,
// avx512vl, avx512vnni, avx512vbmi, avx512bf16, avx2, fma, f16c. The compiler need not know AMX and
// avx512bf16: their instructions are written by name.
#include "kernels.h"
#ifdef PHLOEM_HAS_AMX
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "target.h"

PHLOEM_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")
#define PHLOEM_ISA amx
#define PHLOEM_VNNI
#define PHLOEM_NIBBLE_ROWS
#define PHLOEM_TILES
#include "vector_avx512.h"
#include "kernels_impl.h"
PHLOEM_TARGET_END
#endif
