// What a product reads on its left: rows of float32, and the same rows in int8.
//
// x ≈ scale · q in groups of 32 columns, q in [-127, 127]. Beside them lie the sums of q that turn
// products of codes into products of values.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "matrix.h"

namespace phloem {

struct QuantizedRow {
  int8_t* q;         // [groups · 32], zero beyond the columns
  float* scale;      // [groups]
  float* scaled_sum; // [groups] scale · Σ q
  int32_t* sum;      // [groups] Σ q
  int32_t* half_sum; // [groups · 2] Σ q of each half
  // The row from group `g` on.
  QuantizedRow from(int g) const {
    return {q + g * GROUP, scale + g, scaled_sum + g, sum + g, half_sum + 2 * g};
  }
};

class Activations {
 public:
  Activations(int columns, int rows) : columns_(columns), groups_((columns + GROUP - 1) / GROUP) {
    reserve(rows);
  }
  void reserve(int rows) {
    if (rows <= rows_) return;
    rows_ = rows;
    floats_.assign(static_cast<size_t>(rows) * float_stride(), 0.0f);
    bytes_.assign(static_cast<size_t>(rows) * byte_stride() + 64, 0);
  }
  int columns() const { return columns_; }
  float* row(int i) { return floats_.data() + static_cast<size_t>(i) * float_stride(); }
  const float* row(int i) const { return const_cast<Activations*>(this)->row(i); }
  QuantizedRow quantized(int i) const {
    const auto base = reinterpret_cast<uintptr_t>(bytes_.data());
    auto* p = reinterpret_cast<uint8_t*>((base + 63) / 64 * 64) + i * byte_stride();
    QuantizedRow r;
    r.q = reinterpret_cast<int8_t*>(p);
    r.scale = reinterpret_cast<float*>(p + groups_ * GROUP);
    r.scaled_sum = r.scale + groups_;
    r.sum = reinterpret_cast<int32_t*>(r.scaled_sum + groups_);
    r.half_sum = r.sum + groups_;
    return r;
  }

 private:
  size_t float_stride() const { return (static_cast<size_t>(columns_) + 15) / 16 * 16; }
  size_t byte_stride() const { return (static_cast<size_t>(groups_) * (GROUP + 20) + 63) / 64 * 64; }
  int columns_, groups_, rows_ = 0;
  std::vector<float> floats_;
  std::vector<uint8_t> bytes_;
};

}  // namespace phloem
