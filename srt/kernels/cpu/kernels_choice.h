// Which kernel a matrix and a kind of attention take.
namespace phloem {
namespace PHLOEM_ISA {

#ifdef PHLOEM_TILES
#define INTEGER tile_gemm
#else
#define INTEGER integer_gemm
#endif

static void gemm(const Matrix& w, int begin, int end, const Activations& x, const int* rows,
                 int count, float* out, ptrdiff_t stride) {
  auto* product = &float_gemm<Kind::F32>;
  if (w.kind == Kind::F16) product = &float_gemm<Kind::F16>;
  if (w.kind == Kind::BF16) product = &float_gemm<Kind::BF16>;
  if (w.kind == Kind::U4) {
    if (!w.has_min)
      product = &INTEGER<Kind::U4, 32, false, false>;
    else if (w.wide_scale)
      product = &INTEGER<Kind::U4, 32, true, true>;
    else
      product = &INTEGER<Kind::U4, 32, true, false>;
  }
  if (w.kind == Kind::S8) {
    if (w.group == 0)
      product = &INTEGER<Kind::S8, 0, false, true>;
    else if (w.group == 16)
      product = &INTEGER<Kind::S8, 16, false, true>;
    else if (w.has_min)
      product = &INTEGER<Kind::S8, 32, true, true>;
    else
      product = &INTEGER<Kind::S8, 32, false, false>;
  }
  product(w, begin, end, x, rows, 0, count, out, stride);
}

#undef INTEGER

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
