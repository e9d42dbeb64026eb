// Keys and values in and out of their slots, and queries against a chunk of them.
namespace phloem {
namespace PHLOEM_ISA {

static void store_kv(const KvArray& kv, int slot, int head, const float* x) {
  uint8_t* row = kv.slot(slot) + kv.slot_bytes / kv.heads * head;
  if (kv.type == KvType::S8) {
    f32x16 peaks = zero();
    for (int i = 0; i < kv.dim; i += LANES) peaks = larger_magnitudes(peaks, load(x + i));
    const Coder coder(largest_magnitude(peaks), 127);
    kv.slot_scales(slot)[head] = coder.scale;
    for (int i = 0; i < kv.dim; i += LANES)
      store_s8(reinterpret_cast<int8_t*>(row) + i, coder(load(x + i)));
    return;
  }
  for (int i = 0; i < kv.dim; i += LANES) {
    const f32x16 v = load(x + i);
    if (kv.type == KvType::F32) store(reinterpret_cast<float*>(row) + i, v);
    if (kv.type == KvType::F16) store_f16(reinterpret_cast<uint16_t*>(row) + i, v);
    if (kv.type == KvType::BF16) store_bf16(reinterpret_cast<uint16_t*>(row) + i, v);
  }
}

template <KvType TYPE>
static inline f32x16 load_kv(const uint8_t* row, int i) {
  if (TYPE == KvType::F32) return load(reinterpret_cast<const float*>(row) + i);
  if (TYPE == KvType::F16) return load_f16(reinterpret_cast<const uint16_t*>(row) + i);
  if (TYPE == KvType::BF16) return load_bf16(reinterpret_cast<const uint16_t*>(row) + i);
  return load_s8(reinterpret_cast<const int8_t*>(row) + i);
}

// Sixteen rows of a chunk as float32; beyond its end slot 0, which is always finite. The next
// sixteen are fetched meanwhile: slots lie anywhere, no hardware foresees them.
template <KvType TYPE, int V>
static inline void load_tile(const AttendJob& job, const KvArray& kv, int from, float* out) {
  constexpr size_t BYTES = TYPE == KvType::F32 ? 4 : TYPE == KvType::S8 ? 1 : 2;
  const int vectors = V ? V : kv.dim / LANES;
  const size_t row_bytes = static_cast<size_t>(vectors) * LANES * BYTES;
  const size_t offset = static_cast<size_t>(job.head) * row_bytes;
  const int here = job.count - from < LANES ? job.count - from : LANES;
  const int ahead = job.count - from - LANES < LANES ? job.count - from - LANES : LANES;
  for (int i = 0; i < ahead; i++) {
    const uint8_t* row = kv.slot(job.slots[from + LANES + i]) + offset;
    for (size_t line = 0; line < row_bytes; line += 64) __builtin_prefetch(row + line);
  }
  for (int i = 0; i < LANES; i++) {
    const int32_t slot = i < here ? job.slots[from + i] : 0;
    const uint8_t* row = kv.slot(slot) + offset;
    for (int j = 0; j < vectors; j++) {
      f32x16 v = load_kv<TYPE>(row, j * LANES);
      if (TYPE == KvType::S8) v = mul(v, splat(kv.slot_scales(slot)[job.head]));
      store(out + (i * vectors + j) * LANES, v);
    }
  }
}

// Scores of one query against sixteen keys: over the dimensions lane by lane, then over the lanes.
template <int V>
static inline f32x16 score_tile(const float* query, const float* keys, int dim) {
  f32x16 products[LANES];
  const int vectors = V ? V : dim / LANES;
  for (int i = 0; i < LANES; i++) {
    const float* key = keys + i * dim;
    f32x16 p = mul(load(query), load(key));
    for (int j = 1; j < vectors; j++) p = fma(load(query + j * LANES), load(key + j * LANES), p);
    products[i] = p;
  }
  return sum_each(products);
}

// The same scores from keys with their dimensions outermost, for Q queries at once: every lane of
// a vector is a key, so that the lanes of score_tile are vectors here. P is the part of the tree
// of sums that begins at dimension `lane`, every STEP-th; the tree is that of `sum`.
template <int V, int Q, int STEP>
static inline void score_part(const float* const* query, const float* columns, int dim, int lane,
                              f32x16* out) {
  if constexpr (STEP == LANES) {
    const int vectors = V ? V : dim / LANES;
    for (int j = 0; j < vectors; j++) {
      const int d = j * LANES + lane;
      const f32x16 key = load(columns + d * LANES);
      for (int q = 0; q < Q; q++)
        out[q] = j ? fma(splat(query[q][d]), key, out[q]) : mul(splat(query[q][d]), key);
    }
  } else {
    f32x16 later[Q];
    score_part<V, Q, 2 * STEP>(query, columns, dim, lane, out);
    score_part<V, Q, 2 * STEP>(query, columns, dim, lane + STEP, later);
    for (int q = 0; q < Q; q++) out[q] = add(out[q], later[q]);
  }
}

// sums [dim] += Σ weights[i] · value i, for Q queries at once.
template <int V, int Q>
static inline void add_values(const float* const* weights, const float* values, int dim,
                              float* const* sums) {
  const int vectors = V ? V : dim / LANES;
  constexpr int AT_ONCE = V && V <= 4 ? V : 4;
  for (int from = 0; from < vectors; from += AT_ONCE) {
    const int n = V && V <= 4 ? V : vectors - from < AT_ONCE ? vectors - from : AT_ONCE;
    f32x16 total[Q][AT_ONCE];
    for (int q = 0; q < Q; q++)
      for (int j = 0; j < n; j++) total[q][j] = load(sums[q] + (from + j) * LANES);
    for (int i = 0; i < LANES; i++) {
      const float* value = values + i * dim + from * LANES;
      for (int q = 0; q < Q; q++) {
        const f32x16 weight = splat(weights[q][i]);
        for (int j = 0; j < n; j++) total[q][j] = fma(weight, load(value + j * LANES), total[q][j]);
      }
    }
    for (int q = 0; q < Q; q++)
      for (int j = 0; j < n; j++) store(sums[q] + (from + j) * LANES, total[q][j]);
  }
}

static inline f32x16 soft_capped(f32x16 score, float cap) {
  // cap · tanh(score / cap), tanh(y) = 1 - 2 / (e^2y + 1)
  const f32x16 e = exponential(mul(score, splat(2.0f / cap)));
  const f32x16 t = sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
  return mul(t, splat(cap));
}

static void merge(Softmax& into, const Softmax& later, int dim) {
  if (later.total == 0.0f && later.peak == -INFINITY) return;  // it saw no key
  const float peak = into.peak > later.peak ? into.peak : later.peak;
  const float a = decay_of(into.peak - peak), b = decay_of(later.peak - peak);
  into.peak = peak;
  into.total = std::fma(into.total, a, later.total * b);
  for (int i = 0; i < dim; i += LANES) {
    const f32x16 scaled = mul(load(later.sums + i), splat(b));
    store(into.sums + i, fma(load(into.sums + i), splat(a), scaled));
  }
}

// From scores [padded] of a query to weights, zero for keys that it does not see; clears `sums`.
static inline Softmax take_softmax(const AttendJob& job, int q, float* row, int padded,
                                   float* sums) {
  f32x16 peaks = splat(-INFINITY), totals = zero();
  if (job.soft_cap > 0)
    for (int i = 0; i < padded; i += LANES) store(row + i, soft_capped(load(row + i), job.soft_cap));
  for (int i = 0; i < job.first[q] && i < padded; i++) row[i] = -INFINITY;
  for (int i = job.end[q] > 0 ? job.end[q] : 0; i < padded; i++) row[i] = -INFINITY;
  for (int i = 0; i < padded; i += LANES) peaks = max(peaks, load(row + i));
  const float peak = largest(peaks);
  const bool none = job.first[q] >= job.end[q];
  for (int i = 0; i < padded; i += LANES) {
    const f32x16 weight = none ? zero() : decay(sub(load(row + i), splat(peak)));
    totals = add(totals, weight);
    store(row + i, weight);
  }
  for (int i = 0; i < job.keys.dim; i += LANES) store(sums + i, zero());
  return {none ? -INFINITY : peak, sum(totals), sums};
}

constexpr int WORTH_TRANSPOSING = 8;  // queries from which on turning a tile of keys pays

template <KvType TYPE, int V>
static void attend_chunk(AttendJob& job) {
  const int dim = job.keys.dim, padded = (job.count + LANES - 1) / LANES * LANES;
  float* tile = job.scratch;                   // [LANES][dim]
  float* columns = tile + LANES * dim;         // [dim][LANES]
  float* scores = columns + LANES * dim;       // [queries][CHUNK]
  float* sums = scores + VECTOR_QUERIES * CHUNK;  // [queries][dim]

  for (int from = 0; from < padded; from += LANES) {
    load_tile<TYPE, V>(job, job.keys, from, tile);
    int q = 0;
    if (job.queries >= WORTH_TRANSPOSING) {
      for (int d = 0; d < dim; d += LANES) transpose(tile + d, dim, columns + d * LANES);
      f32x16 score[QUERIES];
      for (; q + QUERIES <= job.queries; q += QUERIES) {
        score_part<V, QUERIES, 1>(job.query + q, columns, dim, 0, score);
        for (int i = 0; i < QUERIES; i++) store(scores + (q + i) * CHUNK + from, score[i]);
      }
    }
    for (; q < job.queries; q++)
      store(scores + q * CHUNK + from, score_tile<V>(job.query[q], tile, dim));
  }

  Softmax own[VECTOR_QUERIES];
  for (int q = 0; q < job.queries; q++)
    own[q] = take_softmax(job, q, scores + q * CHUNK, padded, sums + q * dim);

  const float* weights[VECTOR_QUERIES];
  float* into[VECTOR_QUERIES];
  for (int q = 0; q < job.queries; q++) into[q] = own[q].sums;
  for (int from = 0; from < padded; from += LANES) {
    load_tile<TYPE, V>(job, job.values, from, tile);
    for (int q = 0; q < job.queries; q++) weights[q] = scores + q * CHUNK + from;
    int q = 0;
    for (; q + QUERIES <= job.queries; q += QUERIES)
      add_values<V, QUERIES>(weights + q, tile, dim, into + q);
    if (QUERIES > 1 && q + 3 == job.queries) {
      add_values<V, 3>(weights + q, tile, dim, into + q);
      q += 3;
    }
    if (QUERIES > 1 && q + 2 <= job.queries) {
      add_values<V, 2>(weights + q, tile, dim, into + q);
      q += 2;
    }
    if (q < job.queries) add_values<V, 1>(weights + q, tile, dim, into + q);
  }
  for (int q = 0; q < job.queries; q++) merge(*job.state[q], own[q], dim);
}

template <KvType TYPE>
static void attend_type(AttendJob& job) {
  switch (job.keys.dim) {
    case 64: return attend_chunk<TYPE, 4>(job);
    case 96: return attend_chunk<TYPE, 6>(job);
    case 128: return attend_chunk<TYPE, 8>(job);
    default: return attend_chunk<TYPE, 0>(job);
  }
}

static void vector_attend(AttendJob& job) {
  switch (job.keys.type) {
    case KvType::F32: return attend_type<KvType::F32>(job);
    case KvType::F16: return attend_type<KvType::F16>(job);
    case KvType::BF16: return attend_type<KvType::BF16>(job);
    case KvType::S8: return attend_type<KvType::S8>(job);
  }
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
