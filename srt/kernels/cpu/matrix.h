// A weight matrix, repacked once so that sixteen outputs lie side by side.
//
// Rows (outputs) are grouped in blocks of 16, and a block is read from front to end, so that the
// whole matrix is one stream.
//
// S8, U4: value = scale · code, code in [-127, 127], with a scale for each output and each span of
// up to 768 columns. Behind a block's codes come its spans' scales as float32 and the sums of their
// codes as int32, 16 each.
//   S8: codes in steps of 64 columns, a kilobyte each, what one tile takes: runs of 4 columns of
//       16 outputs, what one dot-product instruction takes.
//   U4: 4 bits a code: what stands for code = (factor · nibble + offset) >> 8, in int16, with a
//       factor and an offset for each output and 32 columns. A block is four quarters of the
//       outputs 4 · lane + quarter: for each 32 columns 64 bytes of nibbles (16 bytes a lane;
//       columns 0 to 15 in the low halves), then for each 32 columns 4 factors and 4 offsets.
// F16, BF16, F32: [column][16 rows].
#pragma once
#include <cstddef>
#include <cstdint>

namespace phloem {

constexpr int LANES = 16;
constexpr int GROUP = 32;      // columns of a factor and an offset
constexpr int STEP = 64;       // columns of a step
constexpr int SPAN_STEPS = 12;  // steps of a span, at most
constexpr size_t STEP_BYTES = STEP * LANES;    // of S8
constexpr size_t GROUP_BYTES = GROUP * 4 / 2;  // of a quarter of U4: nibbles,
constexpr size_t TERM_BYTES = 4 * (2 + 2);     // and factors and offsets
constexpr size_t TAIL_BYTES = LANES * (4 + 4);  // of a span: scales and sums

enum class Kind : int { U4 = 0, S8 = 1, F16 = 2, BF16 = 3, F32 = 4 };

struct Matrix {
  Kind kind;
  int rows, columns;
  uint8_t* data;

  int blocks() const { return (rows + LANES - 1) / LANES; }
  bool integer() const { return kind == Kind::U4 || kind == Kind::S8; }

  int steps() const { return (columns + STEP - 1) / STEP; }
  int spans() const { return (steps() + SPAN_STEPS - 1) / SPAN_STEPS; }
  int span_steps() const { return (steps() + spans() - 1) / spans(); }  // of all but the last
  int span_end(int span) const {
    const int end = (span + 1) * span_steps();
    return end < steps() ? end : steps();
  }
  size_t nibble_bytes() const { return static_cast<size_t>(steps()) * 2 * GROUP_BYTES; }
  size_t quarter_bytes() const {  // whole cache lines
    const size_t terms = static_cast<size_t>(steps()) * 2 * TERM_BYTES;
    return nibble_bytes() + (terms + 63) / 64 * 64;
  }
  size_t code_bytes() const {
    return kind == Kind::U4 ? 4 * quarter_bytes() : static_cast<size_t>(steps()) * STEP_BYTES;
  }
  const uint8_t* tail(const uint8_t* block, int span) const {
    return block + code_bytes() + static_cast<size_t>(span) * TAIL_BYTES;
  }

  size_t stride() const {
    if (integer()) return code_bytes() + static_cast<size_t>(spans()) * TAIL_BYTES;
    return static_cast<size_t>(columns) * LANES * (kind == Kind::F32 ? 4 : 2);
  }
  const uint8_t* block(int i) const { return data + static_cast<size_t>(i) * stride(); }
  size_t bytes() const { return static_cast<size_t>(blocks()) * stride(); }
};

// What the nibble stands for.
inline int code_of(int nibble, uint16_t factor, int16_t offset) {
  const auto sum = static_cast<uint16_t>(factor * static_cast<unsigned>(nibble) +
                                         static_cast<unsigned>(static_cast<uint16_t>(offset)));
  return static_cast<int16_t>(sum) >> 8;
}

// Writes row `row` as float32 [columns].
void read_row(const Matrix& matrix, int row, float* out);

}  // namespace phloem
