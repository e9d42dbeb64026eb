// Integer products of sixteen rows by AMX tiles: the same exact sums of codes as the dot-product
// instructions give, then the same two roundings a group, so the same bits as without.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
#pragma once

namespace phloem {
namespace PHLOEM_ISA {

constexpr int TILE_ROWS = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums [16][16] int32 of one part of a row each; 4: sixteen rows of x, COLUMNS each;
// 5: codes of 16 outputs.
template <int COLUMNS>
static inline void configure_tiles() {
  TileConfig config;
  for (int i = 0; i < 4; i++) {
    config.row_bytes[i] = 64;
    config.rows[i] = TILE_ROWS;
  }
  config.row_bytes[4] = COLUMNS;
  config.rows[4] = TILE_ROWS;
  config.row_bytes[5] = 64;
  config.rows[5] = COLUMNS / 4;
  // The intrinsic does not tell every compiler that it reads the whole of `config`.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// The codes of a block as tiles read them, a byte each: as they are, or unpacked into a buffer of
// this thread, which serves all rows.
template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE>
static inline const uint8_t* unpacked_codes(const Matrix& w, const uint8_t* block) {
  if (KIND == Kind::S8) return nullptr;
  uint8_t* out = thread_buffer(static_cast<size_t>(w.groups()) * GROUP * LANES);
  for (int g = 0; g < w.groups(); g++) {
    const uint8_t* codes = IntegerLayout<KIND, SCALE_GROUP, MIN, WIDE>::codes(block, g);
    for (size_t line = 0; line < GROUP * LANES / 2 + 64; line += 64)
      __builtin_prefetch(codes + AHEAD + line, 0, 2);
    uint8_t* group = out + static_cast<size_t>(g) * GROUP * LANES;
    for (int j = 0; j < 4; j++) {
      const u8x64 run = load_codes(codes + j * 64);
      _mm512_storeu_si512(group + j * 64, low_nibbles(run));
      _mm512_storeu_si512(group + (j + 4) * 64, high_nibbles(run));
    }
  }
  return out;
}

// Four parts go through the tiles while the sums of the four before are scaled and added up: what
// a tile stores takes a while to come out.
template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE>
static inline void amx_tile(const Matrix& w, const uint8_t* block, const uint8_t* unpacked,
                            const QuantizedRow* x, ptrdiff_t x_stride, float* const* out) {
  using Layout = IntegerLayout<KIND, SCALE_GROUP, MIN, WIDE>;
  constexpr int PART = Layout::PART, PARTS = Layout::PARTS;
  alignas(64) int32_t sums[2][4][TILE_ROWS][LANES];
  const int parts = w.groups() * PARTS;
  f32x16 total[TILE_ROWS];
  for (int r = 0; r < TILE_ROWS; r++) total[r] = zero();
  for (int first = 0; first < parts + 4; first += 4) {
#define PHLOEM_PRODUCTS(tile)                                                          \
  if (first + tile < parts) {                                                          \
    const int part = first + tile;                                                     \
    const uint8_t* codes = KIND == Kind::S8 ? Layout::codes(block, part / PARTS) +     \
                                                  part % PARTS * PART * LANES          \
                                            : unpacked + part * GROUP * LANES;         \
    _tile_zero(tile);                                                                  \
    _tile_loadd(4, x[0].q + part * PART, x_stride);                                    \
    _tile_loadd(5, codes, 64);                                                         \
    _tile_dpbsud(tile, 4, 5);                                                          \
    _tile_stored(tile, sums[first / 4 % 2][tile], 64);                                 \
  }
    PHLOEM_PRODUCTS(0)
    PHLOEM_PRODUCTS(1)
    PHLOEM_PRODUCTS(2)
    PHLOEM_PRODUCTS(3)
#undef PHLOEM_PRODUCTS
    for (int part = first - 4; part >= 0 && part < first && part < parts; part++) {
      const int g = part / PARTS;
      f32x16 scale = zero(), minimum = zero();
      if (SCALE_GROUP != 0) scale = load_scale<WIDE>(Layout::scales(block, g, part % PARTS));
      if (MIN) minimum = load_scale<WIDE>(Layout::minima(block, g));
      for (int r = 0; r < TILE_ROWS; r++) {
        i32x16 products = _mm512_load_si512(sums[part / 4 % 2][part % 4][r]);
        const int32_t sum_x = PARTS == 1 ? x[r].sum[part] : x[r].half_sum[part];
        if (KIND == Kind::S8)
          products = _mm512_add_epi32(products, splat_i32(-128 * sum_x));
        else if (!MIN)
          products = _mm512_add_epi32(products, splat_i32(-8 * sum_x));
        if (SCALE_GROUP == 0)
          total[r] = fma(to_float(products), splat(x[r].scale[g]), total[r]);
        else
          total[r] = fma(to_float(products), mul(scale, splat(x[r].scale[g])), total[r]);
        if (MIN) total[r] = fma(minimum, splat(x[r].scaled_sum[g]), total[r]);
      }
    }
  }
  for (int r = 0; r < TILE_ROWS; r++) {
    if (SCALE_GROUP == 0) total[r] = mul(total[r], load_scale<WIDE>(Layout::row_scales(w, block)));
    store(out[r], total[r]);
  }
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
