// Which kernel a matrix and a kind of attention take.
namespace phloem {
namespace PHLOEM_ISA {

static void integer_gemm(const Matrix& w, int begin, int end, const Rows& rows, float* out,
                         ptrdiff_t stride) {
#ifdef PHLOEM_NIBBLE_ROWS
  if (w.kind == Kind::U4 && rows.count <= NIBBLE_ROWS) {
    nibble_gemm(w, begin, end, rows, out, stride);
    return;
  }
#endif
#ifdef PHLOEM_TILES
  if (TileRows::take(rows)) {
    TileRows product(rows);
    multiply_spans(w, begin, end, product, out, stride);
    return;
  }
#endif
  VectorRows product(rows);
  multiply_spans(w, begin, end, product, out, stride);
}

static void gemm(const Matrix& w, int begin, int end, const Activations& x, const int* rows,
                 int count, float* out, ptrdiff_t stride) {
  if (w.integer()) {
    integer_gemm(w, begin, end, {x, rows, count}, out, stride);
    return;
  }
  auto* product = &float_gemm<Kind::F32>;
  if (w.kind == Kind::F16) product = &float_gemm<Kind::F16>;
  if (w.kind == Kind::BF16) product = &float_gemm<Kind::BF16>;
  product(w, begin, end, x, rows, count, out, stride);
}

#ifdef PHLOEM_TILES
static bool has_tiles(KvType type, int dim) {
  return type == KvType::BF16 && dim % 32 == 0 && dim <= MAX_DIM;
}

static int attend_queries(KvType type, int dim) {
  return has_tiles(type, dim) ? MAX_QUERIES : VECTOR_QUERIES;
}

static void attend(AttendJob& job) {
  if (has_tiles(job.keys.type, job.keys.dim))
    TileAttention(job).run();
  else
    vector_attend(job);
}
#else
static int attend_queries(KvType, int) { return VECTOR_QUERIES; }
static void attend(AttendJob& job) { vector_attend(job); }
#endif

}  // namespace PHLOEM_ISA
}  // namespace phloem
