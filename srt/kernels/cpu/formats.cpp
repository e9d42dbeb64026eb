// Layouts: the GGUF specification and ggml's block structures, https://github.com/ggml-org/ggml.
#include "formats.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace phloem {
namespace {

uint16_t read_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}
float read_half(const uint8_t* p) { return half_to_float(read_u16(p)); }

void unpack_f32(const uint8_t* p, int columns, Row& row) {
  row.values.resize(static_cast<size_t>(columns));
  std::memcpy(row.values.data(), p, static_cast<size_t>(columns) * 4);
}
void unpack_f16(const uint8_t* p, int columns, Row& row) {
  row.values.resize(static_cast<size_t>(columns));
  for (int i = 0; i < columns; i++) row.values[i] = half_to_float(read_u16(p + 2 * i));
}
void unpack_bf16(const uint8_t* p, int columns, Row& row) {
  row.values.resize(static_cast<size_t>(columns));
  for (int i = 0; i < columns; i++) row.values[i] = bfloat_to_float(read_u16(p + 2 * i));
}

void nibbles(const uint8_t* p, int16_t* codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = p[i] & 15;
    codes[i + 16] = p[i] >> 4;
  }
}

void prepare(Row& row, int columns, int group, bool has_min) {
  const size_t scales = static_cast<size_t>(columns) / static_cast<size_t>(group);
  row.codes.resize(static_cast<size_t>(columns));
  row.scales.resize(scales);
  row.minima.resize(has_min ? scales : 0);
}

void unpack_q4_0(const uint8_t* p, int columns, Row& row) {
  prepare(row, columns, 32, false);
  for (int g = 0; g * 32 < columns; g++, p += 18) {
    row.scales[g] = read_half(p);
    nibbles(p + 2, row.codes.data() + g * 32);
  }
}

void unpack_q4_1(const uint8_t* p, int columns, Row& row) {
  prepare(row, columns, 32, true);
  for (int g = 0; g * 32 < columns; g++, p += 20) {
    row.scales[g] = read_half(p);
    row.minima[g] = read_half(p + 2);
    nibbles(p + 4, row.codes.data() + g * 32);
  }
}

void fifth_bits(const uint8_t* p, int16_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  for (int i = 0; i < 32; i++) codes[i] = static_cast<int16_t>(codes[i] | (bits >> i & 1) << 4);
}

void unpack_q5_0(const uint8_t* p, int columns, Row& row) {
  prepare(row, columns, 32, false);
  for (int g = 0; g * 32 < columns; g++, p += 22) {
    int16_t* codes = row.codes.data() + g * 32;
    row.scales[g] = read_half(p);
    nibbles(p + 6, codes);
    fifth_bits(p + 2, codes);
    for (int i = 0; i < 32; i++) codes[i] = static_cast<int16_t>(codes[i] - 16);
  }
}

void unpack_q5_1(const uint8_t* p, int columns, Row& row) {
  prepare(row, columns, 32, true);
  for (int g = 0; g * 32 < columns; g++, p += 24) {
    row.scales[g] = read_half(p);
    row.minima[g] = read_half(p + 2);
    nibbles(p + 8, row.codes.data() + g * 32);
    fifth_bits(p + 4, row.codes.data() + g * 32);
  }
}

void unpack_q8_0(const uint8_t* p, int columns, Row& row) {
  prepare(row, columns, 32, false);
  for (int g = 0; g * 32 < columns; g++, p += 34) {
    row.scales[g] = read_half(p);
    for (int i = 0; i < 32; i++) row.codes[g * 32 + i] = static_cast<int8_t>(p[2 + i]);
  }
}

// Six-bit scale and minimum of sub-block j of Q4_K and Q5_K, packed in 12 bytes.
void k_scale(const uint8_t* p, int j, int& scale, int& minimum) {
  if (j < 4) {
    scale = p[j] & 63;
    minimum = p[j + 4] & 63;
  } else {
    scale = (p[j + 4] & 15) | (p[j - 4] >> 6) << 4;
    minimum = (p[j + 4] >> 4) | (p[j] >> 6) << 4;
  }
}

void k_scales(const uint8_t* p, int block, Row& row) {
  const float d = read_half(p), dmin = read_half(p + 2);
  for (int j = 0; j < 8; j++) {
    int scale, minimum;
    k_scale(p + 4, j, scale, minimum);
    row.scales[block * 8 + j] = d * static_cast<float>(scale);
    row.minima[block * 8 + j] = -dmin * static_cast<float>(minimum);
  }
}

void k_nibbles(const uint8_t* p, int16_t* codes) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 32; i++) {
      codes[64 * j + i] = p[32 * j + i] & 15;
      codes[64 * j + 32 + i] = p[32 * j + i] >> 4;
    }
}

void unpack_q4_k(const uint8_t* p, int columns, Row& row) {
  prepare(row, columns, 32, true);
  for (int b = 0; b * 256 < columns; b++, p += 144) {
    k_scales(p, b, row);
    k_nibbles(p + 16, row.codes.data() + b * 256);
  }
}

void unpack_q5_k(const uint8_t* p, int columns, Row& row) {
  prepare(row, columns, 32, true);
  for (int b = 0; b * 256 < columns; b++, p += 176) {
    int16_t* codes = row.codes.data() + b * 256;
    k_scales(p, b, row);
    k_nibbles(p + 48, codes);
    for (int j = 0; j < 8; j++)
      for (int i = 0; i < 32; i++)
        codes[32 * j + i] = static_cast<int16_t>(codes[32 * j + i] | (p[16 + i] >> j & 1) << 4);
  }
}

void unpack_q6_k(const uint8_t* p, int columns, Row& row) {
  prepare(row, columns, 16, false);
  for (int b = 0; b * 256 < columns; b++, p += 210) {
    const uint8_t *low = p, *high = p + 128, *scale = p + 192;
    const float d = read_half(p + 208);
    for (int j = 0; j < 16; j++)
      row.scales[b * 16 + j] = d * static_cast<float>(static_cast<int8_t>(scale[j]));
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < 32; i++) {
        const uint8_t bits = high[32 * half + i];
        const uint8_t first = low[64 * half + i], second = low[64 * half + 32 + i];
        int16_t* codes = row.codes.data() + b * 256 + 128 * half + i;
        codes[0] = static_cast<int16_t>(((first & 15) | (bits & 3) << 4) - 32);
        codes[32] = static_cast<int16_t>(((second & 15) | (bits >> 2 & 3) << 4) - 32);
        codes[64] = static_cast<int16_t>(((first >> 4) | (bits >> 4 & 3) << 4) - 32);
        codes[96] = static_cast<int16_t>(((second >> 4) | (bits >> 6 & 3) << 4) - 32);
      }
  }
}

void unpack_iq4_nl(const uint8_t* p, int columns, Row& row) {
  static const int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                    1,    13,   25,  38,  53,  69,  89,  113};
  prepare(row, columns, 32, false);
  for (int g = 0; g * 32 < columns; g++, p += 18) {
    int16_t* codes = row.codes.data() + g * 32;
    row.scales[g] = read_half(p);
    nibbles(p + 2, codes);
    for (int i = 0; i < 32; i++) codes[i] = values[codes[i]];
  }
}

// Groups of 32 between their extremes. Of a few narrower ranges, the one with the least squared
// error is kept: clipping an outlier often serves the others better.
void quantize_int4(const uint8_t* p, int columns, Row& row) {
  unpack_f32(p, columns, row);
  const int groups = (columns + 31) / 32;
  row.codes.assign(static_cast<size_t>(groups) * 32, 0);
  row.scales.resize(static_cast<size_t>(groups));
  row.minima.resize(static_cast<size_t>(groups));
  for (int g = 0; g < groups; g++) {
    const float* x = row.values.data() + g * 32;
    const int n = std::min(32, columns - g * 32);
    const float low = *std::min_element(x, x + n), high = *std::max_element(x, x + n);
    float best = INFINITY;
    for (int shrink = 0; shrink < 6; shrink++) {
      const float cut = 0.03f * static_cast<float>(shrink) * (high - low);
      const float minimum = half_to_float(float_to_half(low + cut / 2));
      const float scale = half_to_float(float_to_half((high - low - cut) / 15));
      int16_t codes[32];
      float error = 0;
      for (int i = 0; i < n; i++) {
        const float code = scale > 0 ? std::nearbyint((x[i] - minimum) / scale) : 0;
        codes[i] = static_cast<int16_t>(std::min(15.0f, std::max(0.0f, code)));
        const float miss = scale * static_cast<float>(codes[i]) + minimum - x[i];
        error += miss * miss;
      }
      if (error < best) {
        best = error;
        row.scales[g] = scale;
        row.minima[g] = minimum;
        std::copy(codes, codes + n, row.codes.begin() + g * 32);
      }
    }
  }
}

const Format FORMATS[] = {
    {"F32", 1, 4, Kind::F32, false, 0, unpack_f32},
    {"F16", 1, 2, Kind::F16, false, 0, unpack_f16},
    {"BF16", 1, 2, Kind::BF16, false, 0, unpack_bf16},
    {"Q4_0", 32, 18, Kind::U4, false, 32, unpack_q4_0},
    {"Q4_1", 32, 20, Kind::U4, true, 32, unpack_q4_1},
    {"Q5_0", 32, 22, Kind::S8, false, 32, unpack_q5_0},
    {"Q5_1", 32, 24, Kind::S8, true, 32, unpack_q5_1},
    {"Q8_0", 32, 34, Kind::S8, false, 32, unpack_q8_0},
    {"Q4_K", 256, 144, Kind::U4, true, 32, unpack_q4_k},
    {"Q5_K", 256, 176, Kind::S8, true, 32, unpack_q5_k},
    {"Q6_K", 256, 210, Kind::S8, false, 16, unpack_q6_k},
    {"IQ4_NL", 32, 18, Kind::S8, false, 32, unpack_iq4_nl},
    {"int8", 1, 4, Kind::S8, false, 0, unpack_f32},
    {"int4", 1, 4, Kind::U4, true, 32, quantize_int4},
};

}  // namespace

void to_values(const Format& format, int columns, Row& row) {
  if (format.group == 0) return;
  const int zero = format.kind == Kind::U4 && !format.has_min ? 8 : 0;
  row.values.resize(static_cast<size_t>(columns));
  for (int k = 0; k < columns; k++) {
    const size_t at = static_cast<size_t>(k), group = static_cast<size_t>(k / format.group);
    row.values[at] = row.scales[group] * static_cast<float>(row.codes[at] - zero);
    if (format.has_min) row.values[at] += row.minima[group];
  }
}

const Format* find_format(const char* name) {
  for (const Format& format : FORMATS)
    if (std::strcmp(format.name, name) == 0) return &format;
  return nullptr;
}

}  // namespace phloem
