// Products of few rows with codes of four bits, without unpacking them to memory.
//
// A vector has the codes of four outputs (a quarter) for sixteen columns each, looked up in tables of
// sixteen codes; its sums are of four columns each, and are added up at the end of a span.
namespace phloem {
namespace PHLOEM_ISA {

constexpr int NIBBLE_ROWS = 8;  // up to which this is faster than unpacking

// Adds up what a quarter of a block gives for R rows: dwords of four columns for each output.
template <int R>
static inline void add_quarter(const uint8_t* nibbles, const uint8_t* terms, const Span& span,
                               const QuantizedRow* x, bool ahead, code_sums* out) {
  // A sum waits for the one before: of few rows, the columns' halves are summed apart.
  constexpr int LATER = R <= 2 ? 1 : 0;
  code_sums sums[R][1 + LATER];
  for (int r = 0; r < R; r++)
    for (int half = 0; half <= LATER; half++) sums[r][half] = no_sums();
  for (int g = 2 * span.begin; g < 2 * span.end; g++) {
    const uint8_t* here = nibbles + static_cast<size_t>(g) * GROUP_BYTES;
    const NibbleCodes codes(here, terms + static_cast<size_t>(g) * TERM_BYTES);
    if (ahead) __builtin_prefetch(here + AHEAD, 0, 2);
    for (int r = 0; r < R; r++) {
      const uint8_t* columns = x[r].planes + g / 2 * STEP_PLANES + g % 2 * GROUP;
      sums[r][0] = dot(sums[r][0], codes.first, sixteen_columns(columns));
      sums[r][LATER] = dot(sums[r][LATER], codes.second, sixteen_columns(columns + 16));
    }
  }
  for (int r = 0; r < R; r++) {
    out[r] = sums[r][0];
    if (LATER == 0) continue;
    out[r].high = _mm512_add_epi32(out[r].high, sums[r][LATER].high);
    out[r].low = _mm512_add_epi32(out[r].low, sums[r][LATER].low);
  }
}

// R rows against a span of a block.
template <int R>
static inline void nibble_tile(const Matrix& w, const uint8_t* block, const Span& span,
                               const QuantizedRow* x, bool ahead, float* out, ptrdiff_t stride) {
  const Quarters quarters(w, block);
  code_sums fours[4][R];
  for (int q = 0; q < 4; q++)
    add_quarter<R>(quarters.nibbles[q], quarters.terms[q], span, x, ahead, fours[q]);
  for (int r = 0; r < R; r++, out += stride) {
    const __m512i high[4] = {fours[0][r].high, fours[1][r].high, fours[2][r].high, fours[3][r].high};
    const __m512i low[4] = {fours[0][r].low, fours[1][r].low, fours[2][r].low, fours[3][r].low};
    const code_sums sums{add_fours(high), add_fours(low)};
    const f32x16 before = span.index == 0 ? zero() : load(out);
    const f32x16 whole = to_float(whole_sums(sums, span.sums(0)));
    store(out, span.add_to(before, whole, span.scales(0), *x[r].scale));
  }
}

static void nibble_gemm(const Matrix& w, int begin, int end, const Rows& rows, float* out,
                        ptrdiff_t stride) {
  QuantizedRow row[NIBBLE_ROWS];
  for (int i = 0; i < rows.count; i++) row[i] = rows[i];
  for (int b = begin; b < end; b++, out += LANES) {
    const uint8_t* block = w.block(b);
    for (int s = 0; s < w.spans(); s++) {
      Span span(w, s);
      span.tail[0] = w.tail(block, s);
      int i = 0;
      const auto some = [&](auto r) {
        constexpr int R = decltype(r)::value;
        nibble_tile<R>(w, block, span, row + i, i == 0, out + i * stride, stride);
        i += R;
      };
      while (i + 8 <= rows.count) some(std::integral_constant<int, 8>());
      while (i + 4 <= rows.count) some(std::integral_constant<int, 4>());
      while (i + 2 <= rows.count) some(std::integral_constant<int, 2>());
      while (i < rows.count) some(std::integral_constant<int, 1>());
    }
  }
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
