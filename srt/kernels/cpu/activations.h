// What a product reads on its left: rows of float32, and the same rows as integers of 15 bits.
//
// x ≈ scale · q for the whole row, q in [-16383, 16383]: a value far larger than the others of its
// row takes nothing from them that matters.
#pragma once
#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "matrix.h"

namespace phloem {

// Sixteen rows lie together, as tiles take them: for each step of 64 columns two planes of
// [16 rows][64 bytes]. What a plane has is the kernels' own affair.
constexpr ptrdiff_t PLANE = LANES * STEP, STEP_PLANES = 2 * PLANE;

struct QuantizedRow {
  uint8_t* planes;  // its bytes in the first step's first plane
  float* scale;
};

class Activations {
 public:
  Activations(int columns, int rows) : columns_(columns), steps_((columns + STEP - 1) / STEP) {
    reserve(rows);
  }
  void reserve(int rows) {
    if (rows <= rows_) return;
    rows_ = rows;
    floats_.assign(static_cast<size_t>(rows) * float_stride(), 0.0f);
    planes_.assign(static_cast<size_t>((rows + LANES - 1) / LANES) * tile_stride(), 0);
    scales_.assign(static_cast<size_t>(rows), 0.0f);
  }
  int columns() const { return columns_; }
  float* row(int i) { return floats_.data() + static_cast<size_t>(i) * float_stride(); }
  const float* row(int i) const { return const_cast<Activations*>(this)->row(i); }
  QuantizedRow quantized(int i) const {
    auto* planes = const_cast<uint8_t*>(planes_.data());
    return {planes + static_cast<size_t>(i / LANES) * tile_stride() + i % LANES * STEP,
            const_cast<float*>(scales_.data()) + i};
  }

 private:
  size_t float_stride() const { return (static_cast<size_t>(columns_) + 15) / 16 * 16; }
  size_t tile_stride() const { return static_cast<size_t>(steps_) * STEP_PLANES; }
  int columns_, steps_, rows_ = 0;
  StepVector<float> floats_, scales_;
  StepVector<uint8_t> planes_;
};

}  // namespace phloem
