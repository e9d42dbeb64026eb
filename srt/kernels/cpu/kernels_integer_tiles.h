// The same products in AMX tiles, with the same bits.
//
// A row's codes are two planes of bytes, high · 256 + low, each multiplied by the same weights; one
// instruction does that for sixteen rows, sixteen outputs and 64 columns. Weights and rows lie in
// memory as the tiles take them.
namespace phloem {
namespace PHLOEM_ISA {

constexpr int TILES_WORTH = 3;  // rows from which on they are faster than vectors

class TileRows {
 public:
  explicit TileRows(const Rows& rows) : rows_(rows) {}
  ~TileRows() { tiles_release(); }

  // Whether the rows lie as tiles take them.
  static bool take(const Rows& rows) {
    if (rows.count < TILES_WORTH) return false;
    for (int i = 1; rows.rows && i < rows.count; i++)
      if (rows.rows[i] != rows.rows[0] + i) return false;
    return !rows.rows || rows.rows[0] % TILE == 0;
  }

  template <int B>
  void multiply(const Span& span, float* out, ptrdiff_t stride) {
    for (int i = 0; i < rows_.count; i += TILE) {
      const int many = rows_.count - i < TILE ? rows_.count - i : TILE;
      if (many != many_) configure(many);
      const QuantizedRow x = rows_[i];
      sum<B>(x.planes, span, span.ahead && i == 0);
      for (int b = 0; b < B; b++)
        scale(span, b, sums_[2 * b], sums_[2 * b + 1], x.scale, out + i * stride + b * LANES, stride);
    }
  }

 private:
  using Sums = int32_t[TILE][LANES];

  void configure(int rows) {
    many_ = rows;
    TileShapes shapes;
    for (int t = 0; t < 8; t++) shapes.set(t, t < 6 ? rows : TILE, 64);
    tiles_configure(shapes);
  }

  // Tiles 0 to 3 are sums, of high and low codes for one block and for the next; 4 and 5 the
  // codes; 6 and 7 weights.
  template <int B>
  void sum(const uint8_t* planes, const Span& span, bool ahead) {
    tile_clear<0>();
    tile_clear<1>();
    if (B == 2) {
      tile_clear<2>();
      tile_clear<3>();
    }
    size_t at = 0;
    for (int step = span.begin; step < span.end; step++, at += STEP_BYTES) {
      const uint8_t* high = planes + step * STEP_PLANES;
      tile_load<4>(high, STEP);
      tile_load<5>(high + PLANE, STEP);
      tile_load<6>(span.codes[0] + at, 64);
      if (B == 2) tile_load<7>(span.codes[1] + at, 64);
      if (ahead)
        for (size_t line = 0; line < STEP_BYTES; line += 64)
          for (int b = 0; b < B; b++)
            __builtin_prefetch(span.codes[b] + at + AHEAD + line, 0, 2);
      tile_dot_u8<0, 4, 6>();
      tile_dot_u8<1, 5, 6>();
      if (B == 2) {
        tile_dot_u8<2, 4, 7>();
        tile_dot_u8<3, 5, 7>();
      }
    }
    tile_store<0>(sums_[0], 64);
    tile_store<1>(sums_[1], 64);
    if (B == 2) {
      tile_store<2>(sums_[2], 64);
      tile_store<3>(sums_[3], 64);
    }
  }

  void scale(const Span& span, int b, const Sums& high, const Sums& low, const float* by,
             float* out, ptrdiff_t stride) {
    const f32x16 scales = span.scales(b);
    const i32x16 of_codes = span.sums(b);
    for (int r = 0; r < many_; r++, out += stride) {
      const code_sums both{_mm512_load_si512(high[r]), _mm512_load_si512(low[r])};
      const f32x16 before = span.index == 0 ? zero() : load(out);
      store(out, span.add_to(before, to_float(whole_sums(both, of_codes)), scales, by[r]));
    }
  }

  const Rows& rows_;
  int many_ = 0;  // rows that the tiles are configured for
  alignas(64) Sums sums_[4];
};

}  // namespace PHLOEM_ISA
}  // namespace phloem
