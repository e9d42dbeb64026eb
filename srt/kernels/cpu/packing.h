// From stored rows to a `Matrix`.
#pragma once
#include "formats.h"
#include "matrix.h"
#include "team.h"

namespace phloem {

// A matrix of zeros in the kind that `format` is kept in, codes of 4 bits as bytes if not as
// `nibbles`; null if there is no memory.
Matrix* new_matrix(const Format& format, bool nibbles, int rows, int columns);
void delete_matrix(Matrix* matrix);

// Row i of `matrix` becomes stored row order[i] of `data`; -1 leaves it zero.
void pack(const Format& format, const uint8_t* data, ptrdiff_t row_bytes, const int32_t* order,
          Team& team, Matrix& matrix);

}  // namespace phloem
