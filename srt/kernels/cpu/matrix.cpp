#include "matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "arena.h"
#include "half.h"
#include "packing.h"

namespace phloem {
namespace {

// Where in a block of S8 the code of a lane and column is.
size_t code_place(int lane, int column) {
  return static_cast<size_t>(column / 4 * 64 + lane * 4 + column % 4);
}

// Where in a block of U4 things of a lane are.
struct NibblePlaces {
  const Matrix& m;
  const int lane;
  size_t quarter() const { return static_cast<size_t>(lane % 4) * m.quarter_bytes(); }
  size_t nibble(int column, bool& high) const {
    high = column % GROUP >= 16;
    return quarter() + static_cast<size_t>(column / GROUP) * GROUP_BYTES +
           static_cast<size_t>(lane / 4 * 16 + column % 16);
  }
  size_t factor(int group) const {
    return quarter() + m.nibble_bytes() + static_cast<size_t>(group) * TERM_BYTES +
           static_cast<size_t>(lane / 4) * 2;
  }
  size_t offset(int group) const { return factor(group) + TERM_BYTES / 2; }
};

template <class T>
T read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <class T>
void put(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// Reads the codes of one lane, column by column.
class Codes {
 public:
  Codes(const Matrix& m, const uint8_t* block, int lane) : block_(block), places_{m, lane} {}
  int operator()(int column) {
    if (places_.m.kind == Kind::S8)
      return static_cast<int8_t>(block_[code_place(places_.lane, column)]);
    if (column / GROUP != group_) {
      group_ = column / GROUP;
      factor_ = read<uint16_t>(block_ + places_.factor(group_));
      offset_ = read<int16_t>(block_ + places_.offset(group_));
    }
    bool high;
    const uint8_t byte = block_[places_.nibble(column, high)];
    return code_of(high ? byte >> 4 : byte & 15, factor_, offset_);
  }

 private:
  const uint8_t* block_;
  const NibblePlaces places_;
  int group_ = -1;
  uint16_t factor_ = 0;
  int16_t offset_ = 0;
};

void put_floats(const Matrix& m, uint8_t* block, int lane, const Row& row) {
  for (int k = 0; k < m.columns; k++) {
    const size_t at = static_cast<size_t>(k) * LANES + static_cast<size_t>(lane);
    const float v = row.values[static_cast<size_t>(k)];
    if (m.kind == Kind::F32)
      put(block + at * 4, v);
    else
      put(block + at * 2, m.kind == Kind::F16 ? float_to_half(v) : float_to_bfloat(v));
  }
}

void put_nibbles(const Matrix& m, uint8_t* block, int lane, const Row& row) {
  const NibblePlaces places{m, lane};
  bool high;
  for (int k = 0; k < m.columns; k++) {
    const int nibble = row.codes[static_cast<size_t>(k)];
    uint8_t& byte = block[places.nibble(k, high)];
    byte = static_cast<uint8_t>(high ? (byte & 15) | nibble << 4 : (byte & 240) | nibble);
  }
}

struct Terms {
  uint16_t factor, offset;
};

// What makes codes of the nibbles of a group: multiples of 1/256 of `scale`, and a half, for the
// nearest code and not the next lower. They may not fit 16 bits where the codes do.
Terms terms_of(const Format& format, const Row& row, int group, float scale) {
  if (!(scale > 0)) return {0, 128};
  const auto whole = [&](float value) {
    return static_cast<int>(std::nearbyint(std::clamp(value / scale, -32767.f, 32767.f) * 256.0f));
  };
  const auto at = static_cast<size_t>(group);
  const float step = row.scales[at], least = format.has_min ? row.minima[at] : -8 * step;
  return {static_cast<uint16_t>(whole(step)), static_cast<uint16_t>(whole(least) + 128)};
}

// The codes of columns [begin, end), by the largest magnitude among them. Nibbles have the same
// ones whether they are kept as they are or as bytes.
void put_codes(const Matrix& m, uint8_t* block, int lane, const Format& format, const Row& row,
               int begin, int end, float peak) {
  if (format.kind == Kind::U4) {
    const NibblePlaces places{m, lane};
    for (int g = begin / GROUP; g * GROUP < end; g++) {
      const Terms terms = terms_of(format, row, g, peak / 127.0f);
      if (m.kind == Kind::U4) {
        put(block + places.factor(g), terms.factor);
        put(block + places.offset(g), terms.offset);
        continue;
      }
      for (int k = g * GROUP; k < std::min(end, (g + 1) * GROUP); k++)
        block[code_place(lane, k)] = static_cast<uint8_t>(
            code_of(row.codes[static_cast<size_t>(k)], terms.factor,
                    static_cast<int16_t>(terms.offset)));
    }
    return;
  }
  for (int k = begin; k < end; k++) {
    const float share = peak > 0 ? row.values[static_cast<size_t>(k)] / peak : 0;
    block[code_place(lane, k)] =
        static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(share * 127.0f)));
  }
}

void put_spans(const Matrix& m, uint8_t* block, int lane, const Format& format, const Row& row) {
  for (int span = 0; span < m.spans(); span++) {
    const int begin = span * m.span_steps() * STEP;
    const int end = std::min(m.columns, m.span_end(span) * STEP);
    float peak = 0;
    bool finite = true;
    for (int k = begin; k < end; k++) {
      const float v = row.values[static_cast<size_t>(k)];
      peak = std::max(peak, std::fabs(v));
      finite &= std::isfinite(v);
    }
    put_codes(m, block, lane, format, row, begin, end, finite ? peak : 0);
    Codes codes(m, block, lane);
    int32_t sum = 0;  // with what is behind the last column: there, too, products are taken
    for (int k = begin; k < m.span_end(span) * STEP; k++) sum += codes(k);
    uint8_t* tail = const_cast<uint8_t*>(m.tail(block, span)) + lane * 4;
    // Where there is a value that is no number, none comes out.
    put(tail, finite ? peak / 127.0f : std::numeric_limits<float>::quiet_NaN());
    put(tail + LANES * 4, sum);
  }
}

}  // namespace

Matrix* new_matrix(const Format& format, bool nibbles, int rows, int columns) {
  const Kind kind = format.kind == Kind::U4 && !nibbles ? Kind::S8 : format.kind;
  auto* m = new Matrix{kind, rows, columns, nullptr};
  m->data = arena_allocate(m->bytes());
  if (m->data) return m;
  delete m;
  return nullptr;
}

void delete_matrix(Matrix* m) {
  if (m) arena_release(m->data);
  delete m;
}

void pack(const Format& format, const uint8_t* data, ptrdiff_t row_bytes, const int32_t* order,
          Team& team, Matrix& m) {
  team.run(1, [&](Member& me) {
    Row row;
    me.each(m.blocks(), [&](int b) {
      uint8_t* block = m.data + static_cast<size_t>(b) * m.stride();
      for (int lane = 0; lane < LANES && b * LANES + lane < m.rows; lane++) {
        const int source = order[b * LANES + lane];
        if (source < 0) continue;
        format.unpack(data + source * row_bytes, m.columns, row);
        to_values(format, m.columns, row);
        if (m.kind == Kind::U4) put_nibbles(m, block, lane, row);
        if (m.integer())
          put_spans(m, block, lane, format, row);
        else
          put_floats(m, block, lane, row);
      }
    });
  });
}

void read_row(const Matrix& m, int row, float* out) {
  const uint8_t* block = m.block(row / LANES);
  const int lane = row % LANES;
  if (m.integer()) {
    Codes codes(m, block, lane);
    for (int span = 0; span < m.spans(); span++) {
      const int end = std::min(m.columns, m.span_end(span) * STEP);
      const auto scale = read<float>(m.tail(block, span) + lane * 4);
      for (int k = span * m.span_steps() * STEP; k < end; k++)
        out[k] = scale * static_cast<float>(codes(k));
    }
    return;
  }
  for (int k = 0; k < m.columns; k++) {
    const size_t at = static_cast<size_t>(k) * LANES + static_cast<size_t>(lane);
    if (m.kind == Kind::F32) {
      out[k] = read<float>(block + at * 4);
      continue;
    }
    const auto h = read<uint16_t>(block + at * 2);
    out[k] = m.kind == Kind::F16 ? half_to_float(h) : bfloat_to_float(h);
  }
}

}  // namespace phloem
