// The kernels, in the words of a vector header. Included once for each instruction set.
//
// A row's result depends on nothing but the row: sums run over columns, keys and lanes in one fixed
// order, however many rows are computed together, and by the same rounded operations on every CPU,
// but for attention in AMX tiles.
#include "kernels.h"

#include "kernels_elementwise.h"
#include "kernels_float_products.h"
#include "kernels_nibbles.h"
#include "kernels_integer_products.h"
#ifdef PHLOEM_NIBBLE_ROWS
#include "kernels_nibble_rows.h"
#endif
#include "kernels_attention.h"
#ifdef PHLOEM_TILES
#include "tiles.h"
#include "kernels_integer_tiles.h"
#include "kernels_attention_tiles.h"
#endif
#include "kernels_choice.h"

namespace phloem {

#define PHLOEM_JOIN(a, b) a##b
#define PHLOEM_TABLE(isa) PHLOEM_JOIN(isa, _kernels)
#define PHLOEM_TEXT_OF(x) #x
#define PHLOEM_TEXT(x) PHLOEM_TEXT_OF(x)

const Kernels PHLOEM_TABLE(PHLOEM_ISA) = {
    PHLOEM_TEXT(PHLOEM_ISA),    PHLOEM_ISA::quantize,
    PHLOEM_ISA::rms_norm,       PHLOEM_ISA::gemm,
    PHLOEM_ISA::silu_and_mul,   PHLOEM_ISA::divide,
    PHLOEM_ISA::accumulate,     PHLOEM_ISA::rotate,
    PHLOEM_ISA::store_kv,       PHLOEM_ISA::attend_queries,
    PHLOEM_ISA::attend,         PHLOEM_ISA::merge,
};

}  // namespace phloem
