#include "matrix.h"

#include <cstring>

#include "arena.h"
#include "half.h"
#include "packing.h"

namespace phloem {
namespace {

float read_scale(const Matrix& m, const uint8_t* at) {
  if (m.wide_scale) {
    float v;
    std::memcpy(&v, at, 4);
    return v;
  }
  uint16_t h;
  std::memcpy(&h, at, 2);
  return half_to_float(h);
}

void put_scale(const Matrix& m, uint8_t* at, float value) {
  if (m.wide_scale) {
    std::memcpy(at, &value, 4);
  } else {
    const uint16_t h = float_to_half(value);
    std::memcpy(at, &h, 2);
  }
}

// Where in a block the code of a lane and column is, and in which half of its byte.
size_t code_place(const Matrix& m, int lane, int column, bool& high) {
  const int group = column / GROUP, within = column % GROUP;
  const size_t codes = static_cast<size_t>(group / 2) * m.record() + (group % 2) * m.group_codes();
  high = m.kind == Kind::U4 && within >= 16;
  const int quad = m.kind == Kind::U4 ? within % 16 / 4 : within / 4;
  return codes + static_cast<size_t>(quad * 64 + lane * 4 + within % 4);
}

// Where the scale of a lane and column is; its minimum is one pair of groups' scales further on.
size_t scale_place(const Matrix& m, int lane, int column) {
  const size_t lane_at = static_cast<size_t>(lane) * m.scale_size();
  if (m.group == 0) return m.records() * m.record() + lane_at;
  const int group = column / GROUP, part = column % GROUP / m.group;
  return static_cast<size_t>(group / 2) * m.record() + 2 * m.group_codes() +
         (group % 2) * m.group_scales() + static_cast<size_t>(part) * LANES * m.scale_size() +
         lane_at;
}

void put_floats(const Matrix& m, uint8_t* block, int lane, const Row& row) {
  for (int k = 0; k < m.columns; k++) {
    const size_t at = static_cast<size_t>(k) * LANES + lane;
    const float v = row.values[static_cast<size_t>(k)];
    if (m.kind == Kind::F32) {
      std::memcpy(block + at * 4, &v, 4);
    } else {
      const uint16_t h = m.kind == Kind::F16 ? float_to_half(v) : float_to_bfloat(v);
      std::memcpy(block + at * 2, &h, 2);
    }
  }
}

void put_codes(const Matrix& m, uint8_t* block, int lane, const Row& row) {
  bool high;
  for (int k = 0; k < m.columns; k++) {
    const int code = row.codes[static_cast<size_t>(k)];
    uint8_t& byte = block[code_place(m, lane, k, high)];
    if (m.kind == Kind::S8)
      byte = static_cast<uint8_t>(code + 128);
    else
      byte = static_cast<uint8_t>(high ? (byte & 15) | code << 4 : (byte & 240) | code);
  }
  const int step = m.group ? m.group : m.columns;
  for (int i = 0; i * step < m.columns; i++) {
    uint8_t* scale = block + scale_place(m, lane, i * step);
    put_scale(m, scale, row.scales[static_cast<size_t>(i)]);
    if (m.has_min) put_scale(m, scale + 2 * m.group_scales(), row.minima[static_cast<size_t>(i)]);
  }
}

}  // namespace

Matrix* new_matrix(const Format& format, int rows, int columns) {
  auto* m = new Matrix{format.kind, format.has_min, format.wide_scale, format.group, rows, columns,
                       nullptr};
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
        if (m.integer())
          put_codes(m, block, lane, row);
        else
          put_floats(m, block, lane, row);
      }
    });
  });
}

void read_row(const Matrix& m, int row, float* out) {
  const uint8_t* block = m.block(row / LANES);
  const int lane = row % LANES;
  if (!m.integer()) {
    for (int k = 0; k < m.columns; k++) {
      const size_t at = static_cast<size_t>(k) * LANES + static_cast<size_t>(lane);
      uint16_t h;
      if (m.kind == Kind::F32) {
        std::memcpy(out + k, block + at * 4, 4);
        continue;
      }
      std::memcpy(&h, block + at * 2, 2);
      out[k] = m.kind == Kind::F16 ? half_to_float(h) : bfloat_to_float(h);
    }
    return;
  }
  float scale = 0, minimum = 0;
  for (int k = 0; k < m.columns; k++) {
    if (k == 0 || (m.group && k % m.group == 0)) {
      const uint8_t* at = block + scale_place(m, lane, k);
      scale = read_scale(m, at);
      if (m.has_min) minimum = read_scale(m, at + 2 * m.group_scales());
    }
    bool high;
    const uint8_t byte = block[code_place(m, lane, k, high)];
    int code = byte - 128;
    if (m.kind == Kind::U4) code = (high ? byte >> 4 : byte & 15) - (m.has_min ? 0 : 8);
    out[k] = scale * static_cast<float>(code) + minimum;
  }
}

}  // namespace phloem
