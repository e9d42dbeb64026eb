// A weight matrix, repacked once so that sixteen outputs lie side by side.
//
// Rows (outputs) are grouped in blocks of 16, and a block is read from front to end, so that the
// whole matrix is one stream. A block of integer codes is a sequence of records, each for two
// groups of 32 columns: the codes of both, their scales, their minima (16 each a group).
//
//   value[row][column] = scale[row][group] · code + minimum[row][group]
//
// Codes of 16 rows are interleaved by fours: 64 bytes are 16 rows × 4 columns, what one
// dot-product instruction takes.
// U4: two codes a byte, columns 4j.. in the low halves of run j, 16 + 4j.. in the high ones;
//     without minima the code stands for code - 8.
// S8: a byte is code + 128. `group` 16 has two scales for 32 columns; `group` 0 has one for the
//     row, at the end of the block.
// F16, BF16, F32: [column][16 rows], no scales.
#pragma once
#include <cstddef>
#include <cstdint>

namespace phloem {

constexpr int LANES = 16;
constexpr int GROUP = 32;

enum class Kind : int { U4 = 0, S8 = 1, F16 = 2, BF16 = 3, F32 = 4 };

struct Matrix {
  Kind kind;
  bool has_min;     // minima beside the scales
  bool wide_scale;  // scales and minima as float32, else float16
  int group;        // columns a scale is for: 32, 16 or 0 (all)
  int rows, columns;
  uint8_t* data;

  int blocks() const { return (rows + LANES - 1) / LANES; }
  int groups() const { return (columns + GROUP - 1) / GROUP; }
  bool integer() const { return kind == Kind::U4 || kind == Kind::S8; }
  size_t scale_size() const { return wide_scale ? 4 : 2; }  // of one scale
  size_t group_codes() const { return kind == Kind::U4 ? GROUP * LANES / 2 : GROUP * LANES; }
  size_t group_scales() const {  // bytes of the scales of a group
    return group ? static_cast<size_t>(GROUP / group) * LANES * scale_size() : 0;
  }
  size_t record() const { return 2 * (group_codes() + group_scales() * (has_min ? 2 : 1)); }
  size_t records() const { return static_cast<size_t>(groups() + 1) / 2; }
  size_t stride() const {
    if (integer()) return records() * record() + (group ? 0 : LANES * scale_size());
    return static_cast<size_t>(columns) * LANES * (kind == Kind::F32 ? 4 : 2);
  }
  const uint8_t* block(int i) const { return data + static_cast<size_t>(i) * stride(); }
  size_t bytes() const { return static_cast<size_t>(blocks()) * stride(); }
};

// Writes row `row` as float32 [columns].
void read_row(const Matrix& matrix, int row, float* out);

}  // namespace phloem
