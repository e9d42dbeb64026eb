// Stored element types → codes, scales and minima of whole rows.
#pragma once
#include <cstdint>
#include <vector>

#include "matrix.h"

namespace phloem {

// One row, unpacked. `codes` are what the scale of their group multiplies: 0..15 for U4 (with the
// zero point 8 if there are no minima). `values` are filled instead by formats without codes.
struct Row {
  std::vector<int16_t> codes;
  std::vector<float> scales, minima, values;
};

struct Format {
  const char* name;
  int elements, bytes;  // of a block
  Kind kind;
  bool has_min;
  int group;  // columns of a scale; 0: there are no codes
  void (*unpack)(const uint8_t* data, int columns, Row& row);
};

// `values` from codes, scales and minima, if there are any.
void to_values(const Format& format, int columns, Row& row);

// The format called `name` (as GGUF calls it, or "int8" and "int4": float32 rows to be quantised);
// null if there is none.
const Format* find_format(const char* name);

}  // namespace phloem
