// Products of quantised rows with a matrix of integer codes (S8 and U4, see matrix.h).
//
// Sums of products over a span of columns are exact: 768 · 127 · 16,383 < 2³¹. They are scaled by
// the span's scale and added up, then scaled by the row's: in that order everywhere.
namespace phloem {
namespace PHLOEM_ISA {

constexpr int RUNS = STEP / 4;  // runs of four columns in a step

// A span of one block or of two neighbours.
struct Span {
  const int index, begin, end;  // begin and end are steps
  const bool last;
  const uint8_t* tail[2] = {};
  const uint8_t* codes[2] = {};  // in steps of S8
  bool ahead = false;            // whether they come from memory, so that the next have to be fetched

  Span(const Matrix& w, int s)
      : index(s), begin(s * w.span_steps()), end(w.span_end(s)), last(s + 1 == w.spans()) {}
  f32x16 scales(int b) const { return load(reinterpret_cast<const float*>(tail[b])); }
  i32x16 sums(int b) const { return load_i32(tail[b] + LANES * sizeof(float)); }
  // What the span's sums make of a row's total so far.
  f32x16 add_to(f32x16 total, f32x16 sums, f32x16 scales, float by) const {
    total = index == 0 ? mul(sums, scales) : fma(sums, scales, total);
    return last ? mul(total, splat(by)) : total;
  }
};

// R rows of x against B blocks.
template <int R, int B>
static inline void span_tile(const Span& span, const QuantizedRow* x, bool ahead, float* out,
                             ptrdiff_t stride) {
  code_sums sums[R][B];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) sums[r][b] = no_sums();
  size_t at = 0;
  for (int step = span.begin; step < span.end; step++)
    for (int run = 0; run < RUNS; run++, at += 64) {
      s8_codes codes[B];
      for (int b = 0; b < B; b++) {
        codes[b] = load_s8_codes(span.codes[b] + at);
        if (ahead) __builtin_prefetch(span.codes[b] + at + AHEAD, 0, 2);
      }
      for (int r = 0; r < R; r++) {
        const row_run columns = load_run(x[r].planes + step * STEP_PLANES, run);
        for (int b = 0; b < B; b++) sums[r][b] = dot(sums[r][b], codes[b], columns);
      }
    }
  for (int b = 0; b < B; b++) {
    const f32x16 scales = span.scales(b);
    for (int r = 0; r < R; r++) {
      float* to = out + r * stride + b * LANES;
      const f32x16 before = span.index == 0 ? zero() : load(to);
      const f32x16 whole = to_float(whole_sums(sums[r][b], span.sums(b)));
      store(to, span.add_to(before, whole, scales, *x[r].scale));
    }
  }
}

// Rows rows[i] of x (row i if `rows` is null), i in [0, count).
struct Rows {
  const Activations& x;
  const int* rows;
  const int count;
  QuantizedRow operator[](int i) const { return x.quantized(rows ? rows[i] : i); }
};

// How a span is multiplied by rows: in vectors.
class VectorRows {
 public:
  explicit VectorRows(const Rows& rows) : rows_(rows) {}

  template <int B>
  void multiply(const Span& span, float* out, ptrdiff_t stride) {
    QuantizedRow row[SPAN_ROWS];
    for (int i = 0; i < rows_.count;) {
      const bool ahead = span.ahead && i == 0;
      float* to = out + i * stride;
      if (i + SPAN_ROWS <= rows_.count) {
        for (int r = 0; r < SPAN_ROWS; r++) row[r] = rows_[i + r];
        span_tile<SPAN_ROWS, B>(span, row, ahead, to, stride);
        i += SPAN_ROWS;
      } else {
        row[0] = rows_[i];
        span_tile<1, B>(span, row, ahead, to, stride);
        i++;
      }
    }
  }

 private:
  const Rows& rows_;
};

// Blocks [begin, end) of w, two at once, by a `Product` of rows.
template <class Product>
static void multiply_spans(const Matrix& w, int begin, int end, Product& product, float* out,
                           ptrdiff_t stride) {
  alignas(64) uint8_t unpacked[2][SPAN_STEPS * STEP_BYTES];
  for (int b = begin; b < end;) {
    const int blocks = b + 2 <= end ? 2 : 1;
    for (int s = 0; s < w.spans(); s++) {
      Span span(w, s);
      span.ahead = w.kind == Kind::S8;
      for (int i = 0; i < blocks; i++) {
        const uint8_t* block = w.block(b + i);
        span.tail[i] = w.tail(block, s);
        span.codes[i] = block + static_cast<size_t>(span.begin) * STEP_BYTES;
        if (w.kind == Kind::S8) continue;
        unpack_nibbles(w, block, span.begin, span.end, unpacked[i]);
        span.codes[i] = unpacked[i];
      }
      float* to = out + (b - begin) * LANES;
      if (blocks == 2)
        product.template multiply<2>(span, to, stride);
      else
        product.template multiply<1>(span, to, stride);
    }
    b += blocks;
  }
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
