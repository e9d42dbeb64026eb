// Integer products of many rows in AMX tiles; the same bits as those of integer_gemm.
//
// One instruction multiplies sixteen rows of x by the codes of sixteen outputs, for the 32 columns
// that share a scale. Scaling these sums takes longer than that. While tiles are at work other
// vector instructions have half their speed, so the two take turns: as many sums are computed as
// the first-level cache holds beside the rest, then they are scaled.
namespace phloem {
namespace PHLOEM_ISA {

constexpr int TILES_WORTH = 32;  // rows from which on unpacking pays
constexpr int TILE_WORTH = 12;   // rows from which on one more tile does
constexpr int SEGMENT = 20;      // sums of a row and an output that wait to be scaled

// Consecutive rows, up to MANY, against blocks of sixteen outputs.
template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE>
class TileProduct {
 public:
  static void run(const Matrix& w, int begin, int end, const QuantizedRow* x, int count,
                  float* out, ptrdiff_t stride) {
    TileProduct product(w, x, count);
    const int units = w.groups() * PARTS, segments = (units + SEGMENT - 1) / SEGMENT;
    for (int s = 0; s < segments; s++) {
      product.segment(units * s / segments, units * (s + 1) / segments);
      for (int b = begin; b < end; b++)
        product.block(w.block(b), out + (b - begin) * LANES, stride);
    }
    tiles_release();
  }

 private:
  using Layout = IntegerLayout<KIND, SCALE_GROUP, MIN, WIDE>;
  static constexpr int PART = Layout::PART, PARTS = Layout::PARTS;

  TileProduct(const Matrix& w, const QuantizedRow* x, int count)
      : w_(w), x_(x), count_(count), row_bytes_(x[1].q - x[0].q) {
    configure(TILE);
  }

  void configure(int rows) {
    rows_ = rows;
    TileShapes shapes;
    for (int t = 0; t < 8; t++)
      shapes.set(t, t < 6 ? rows : PART / 4, t == 4 || t == 5 ? PART : 64);
    tiles_configure(shapes);
  }

  // Goes on to units [begin, end): a unit is the columns of one scale.
  void segment(int begin, int end) {
    first_ = begin;
    units_ = end - begin;
    last_ = end == w_.groups() * PARTS;
    const int first = begin / PARTS, groups = (end - 1) / PARTS + 1 - first;
    for (int from = 0; from < count_; from += TILE)
      for (int g = 0; g < groups; g += LANES) {
        gather(&QuantizedRow::scale, from, first + g, row_scales_[from / TILE][g]);
        if (MIN) gather(&QuantizedRow::scaled_sum, from, first + g, row_sums_[from / TILE][g]);
      }
  }

  // Sixteen numbers of sixteen rows, the rows' side by side.
  void gather(float* QuantizedRow::*numbers, int from, int g, float* out) {
    float rows[TILE][LANES];
    const int groups = w_.groups() - g < LANES ? w_.groups() - g : LANES;
    for (int r = 0; r < TILE; r++) {
      const float* of_row = x_[from + r < count_ ? from + r : from].*numbers + g;
      store(rows[r], groups == LANES ? load(of_row) : load_part(of_row, groups));
    }
    transpose(rows[0], LANES, out);
  }

  void block(const uint8_t* block, float* out, ptrdiff_t stride) {
    for (int at = 0; at < units_; at++) unpack(block, at);
    for (int from = 0; from < count_; from += TILE) {
      const int rows = count_ - from < TILE ? count_ - from : TILE;
      if (rows != rows_) configure(rows);
      multiply(x_[from].q + first_ * PART);
      float* to = out + from * stride;
      int r = 0;
      for (; r + TILE <= rows; r += TILE) scale<TILE>(block, from, r, to, stride);
      for (; r + 4 <= rows; r += 4) scale<4>(block, from, r, to, stride);
      for (; r < rows; r++) scale<1>(block, from, r, to, stride);
    }
  }

  // Codes as the tiles take them, signed; scales as float32.
  void unpack(const uint8_t* block, int at) {
    const int g = (first_ + at) / PARTS, part = (first_ + at) % PARTS;
    const uint8_t* from = Layout::codes(block, g, part);
    int8_t* to = codes_[at];
    for (size_t line = 0; line < Layout::RECORD / (2 * PARTS) + 64; line += 64)
      __builtin_prefetch(from + w_.stride() + line, 0, 2);
    if (KIND == Kind::U4) {
      const __m512i zero_code = _mm512_set1_epi8(MIN ? 0 : 8);
      for (int j = 0; j < 4; j++) {
        const u8x64 run = load_codes(from + 64 * j);
        _mm512_store_si512(to + 64 * j, _mm512_sub_epi8(low_nibbles(run), zero_code));
        _mm512_store_si512(to + 256 + 64 * j, _mm512_sub_epi8(high_nibbles(run), zero_code));
      }
    } else {
      const __m512i sign = _mm512_set1_epi8(-128);
      for (int j = 0; j < PART / 4; j++)
        _mm512_store_si512(to + 64 * j, _mm512_xor_si512(load_codes(from + 64 * j), sign));
    }
    if (SCALE_GROUP != 0) store(scales_[at], load_scale<WIDE>(Layout::scales(block, g, part)));
    if (MIN) store(minima_[at], load_scale<WIDE>(Layout::minima(block, g)));
  }

  template <int T>
  void start(const int8_t* q, int at) {
    tile_load<4 + T % 2>(q + at * PART, row_bytes_);
    tile_load<6 + T % 2>(codes_[at], 64);
    tile_clear<T>();
    tile_dot_s8<T, 4 + T % 2, 6 + T % 2>();
  }
  template <int T>
  void finish(int at) {
    tile_store<T>(sums_[at], 64);
  }

  // Sums of codes of all units; each is stored while the next ones are computed.
  void multiply(const int8_t* q) {
    int at = 0;
    for (; at + 4 <= units_; at += 4) {
      start<0>(q, at);
      start<1>(q, at + 1);
      if (at) {
        finish<2>(at - 2);
        finish<3>(at - 1);
      }
      start<2>(q, at + 2);
      start<3>(q, at + 3);
      finish<0>(at);
      finish<1>(at + 1);
    }
    const int left = units_ - at;
    if (left > 0) start<0>(q, at);
    if (left > 1) start<1>(q, at + 1);
    if (at) {
      finish<2>(at - 2);
      finish<3>(at - 1);
    }
    if (left > 2) start<2>(q, at + 2);
    if (left > 0) finish<0>(at);
    if (left > 1) finish<1>(at + 1);
    if (left > 2) finish<2>(at + 2);
  }

  // Adds the scaled sums to `out`, for R rows from row `r` of the tile on.
  template <int R>
  void scale(const uint8_t* block, int from, int r, float* out, ptrdiff_t stride) {
    out += r * stride;
    f32x16 total[R];
    for (int i = 0; i < R; i++) total[i] = first_ == 0 ? zero() : load(out + i * stride);
    const auto& row_scales = row_scales_[from / TILE];
    const auto& row_sums = row_sums_[from / TILE];
    for (int at = 0; at < units_; at++) {
      const int g = (first_ + at) / PARTS - first_ / PARTS;
      const f32x16 scale = load(scales_[at]), minimum = load(minima_[at]);
      for (int i = 0; i < R; i++) {
        const f32x16 sum = to_float(_mm512_load_si512(sums_[at][r + i]));
        const f32x16 by = splat(row_scales[g][r + i]);
        total[i] = fma(sum, SCALE_GROUP == 0 ? by : mul(scale, by), total[i]);
        if (MIN) total[i] = fma(minimum, splat(row_sums[g][r + i]), total[i]);
      }
    }
    if (SCALE_GROUP == 0 && last_) {
      const f32x16 by = load_scale<WIDE>(Layout::row_scales(w_, block));
      for (int i = 0; i < R; i++) total[i] = mul(total[i], by);
    }
    for (int i = 0; i < R; i++) store(out + i * stride, total[i]);
  }

  const Matrix& w_;
  const QuantizedRow* const x_;
  const int count_;
  const ptrdiff_t row_bytes_;
  int rows_ = 0;              // that the tiles are configured for
  int first_ = 0, units_ = 0;  // of the segment
  bool last_ = false;
  using PerRow = float[MANY / TILE][2 * LANES][TILE];  // of each group
  alignas(64) PerRow row_scales_, row_sums_;
  alignas(64) int8_t codes_[SEGMENT][GROUP * LANES];
  alignas(64) float scales_[SEGMENT][LANES], minima_[SEGMENT][LANES];
  alignas(64) int32_t sums_[SEGMENT][TILE][LANES];
};

static bool consecutive(const int* rows, int count) {
  for (int i = 1; rows && i < count; i++)
    if (rows[i] != rows[0] + i) return false;
  return true;
}

template <Kind KIND, int SCALE_GROUP, bool MIN, bool WIDE>
static void tile_gemm(const Matrix& w, int begin, int end, const Activations& x, const int* rows,
                      int from, int count, float* out, ptrdiff_t stride) {
  while (count - from >= TILES_WORTH) {
    int many = count - from < MANY ? count - from : MANY;
    if (many % TILE < TILE_WORTH) many -= many % TILE;
    if (!consecutive(rows ? rows + from : nullptr, many)) break;
    QuantizedRow row[MANY];
    for (int i = 0; i < many; i++) row[i] = x.quantized(rows ? rows[from + i] : from + i);
    TileProduct<KIND, SCALE_GROUP, MIN, WIDE>::run(w, begin, end, row, many, out + from * stride,
                                                   stride);
    from += many;
  }
  if (from < count)
    integer_gemm<KIND, SCALE_GROUP, MIN, WIDE>(w, begin, end, x, rows, from, count, out, stride);
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
