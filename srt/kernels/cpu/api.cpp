// What Python calls, through ctypes. Everything returns null or a negative number on failure, and
// `phloem_error` then says why.
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "formats.h"
#include "kernels.h"
#include "packing.h"
#include "team.h"

#if defined(_WIN32)
#define API extern "C" __declspec(dllexport)
#else
#define API extern "C" __attribute__((visibility("default")))
#endif

using namespace phloem;

namespace {

thread_local std::string last_error;

template <class Result, class Body>
Result guarded(Result failure, Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return failure;
}

struct Reference {  // attention alone, for the tests
  AttentionShape shape;
  const Kernels& kernels;
  Team& team;
  KvPool kv;
  Attention attention;
};

std::vector<SequenceRow> sequence_rows(int rows, const int32_t* counts, const int32_t* lengths,
                                       const int32_t* const* slots) {
  std::vector<SequenceRow> all;
  int query = 0;
  for (int i = 0; i < rows; i++) {
    all.push_back({query, counts[i], lengths[i], slots[i]});
    query += counts[i];
  }
  return all;
}

void check_slots(const Decoder& decoder, const int32_t* slots, int count) {
  for (int i = 0; i < count; i++)
    if (slots[i] < 1 || slots[i] >= decoder.spec().slots)
      throw std::out_of_range("slot " + std::to_string(slots[i]) + " is not one of a token");
}

}  // namespace

API const char* phloem_error() { return last_error.c_str(); }

API const char* phloem_isas() { return runnable_kernels(); }

API const void* phloem_kernels(const char* name) {
  const Kernels* kernels = find_kernels(name);
  if (!kernels) last_error = std::string("this CPU has no kernels called ") + name;
  return kernels;
}

API const char* phloem_kernels_name(const void* kernels) {
  return static_cast<const Kernels*>(kernels)->name;
}

API void* phloem_team_new(int size) {
  return guarded<void*>(nullptr, [&] { return new Team(size); });
}

API void phloem_team_delete(void* team) { delete static_cast<Team*>(team); }

// Bytes of a row of `columns` in `format`; negative if such rows cannot be.
API int64_t phloem_row_bytes(const char* format, int columns) {
  const Format* f = find_format(format);
  if (!f || columns % f->elements) return -1;
  return static_cast<int64_t>(columns) / f->elements * f->bytes;
}

API void* phloem_matrix_new(const char* format, int nibbles, int rows, int columns) {
  return guarded<void*>(nullptr, [&]() -> void* {
    const Format* f = find_format(format);
    Matrix* m = f ? new_matrix(*f, nibbles, rows, columns) : nullptr;
    if (!m) last_error = f ? "out of memory" : std::string("no format called ") + format;
    return m;
  });
}

API void phloem_matrix_pack(void* matrix, const char* format, const uint8_t* data,
                            int64_t row_bytes, const int32_t* order, void* team) {
  pack(*find_format(format), data, static_cast<ptrdiff_t>(row_bytes), order,
       *static_cast<Team*>(team), *static_cast<Matrix*>(matrix));
}

API void phloem_matrix_delete(void* matrix) { delete_matrix(static_cast<Matrix*>(matrix)); }

API int64_t phloem_matrix_bytes(const void* matrix) {
  return static_cast<int64_t>(static_cast<const Matrix*>(matrix)->bytes());
}

API void phloem_matrix_row(const void* matrix, int row, float* out) {
  read_row(*static_cast<const Matrix*>(matrix), row, out);
}

// x [rows][columns] · wᵀ → out [rows][w.rows rounded up to 16].
API int phloem_multiply(const void* kernels, const void* matrix, const float* x, int rows,
                        float* out) {
  return guarded(-1, [&] {
    const auto& k = *static_cast<const Kernels*>(kernels);
    const auto& w = *static_cast<const Matrix*>(matrix);
    Activations activations(w.columns, rows);
    for (int i = 0; i < rows; i++) {
      std::memcpy(activations.row(i), x + static_cast<size_t>(i) * w.columns,
                  static_cast<size_t>(w.columns) * sizeof(float));
      if (w.integer()) k.quantize(activations.row(i), w.columns, activations.quantized(i));
    }
    k.gemm(w, 0, w.blocks(), activations, nullptr, rows, out, w.blocks() * LANES);
    return 0;
  });
}

API void* phloem_attention_new(const void* kernels, void* team, int heads, int kv_heads,
                               int head_dim, int window, float soft_cap, int kv_type, int slots) {
  return guarded<void*>(nullptr, [&]() -> void* {
    const AttentionShape shape{heads, kv_heads, head_dim, window, soft_cap};
    const auto& k = *static_cast<const Kernels*>(kernels);
    auto& t = *static_cast<Team*>(team);
    const auto type = static_cast<KvType>(kv_type);
    return new Reference{shape, k, t, {kv_heads, shape.padded_dim(), type, 1, slots}, {shape, type, k, t.size()}};
  });
}

API void phloem_attention_delete(void* attention) { delete static_cast<Reference*>(attention); }

// k, v [count][kv_heads][head_dim]
API int phloem_attention_write(void* attention, int count, const int32_t* slots, const float* k,
                               const float* v) {
  return guarded(-1, [&] {
    auto& a = *static_cast<Reference*>(attention);
    const int dim = a.shape.head_dim;
    std::vector<float> padded(static_cast<size_t>(a.shape.padded_dim()), 0.0f);
    for (int i = 0; i < count; i++)
      for (int head = 0; head < a.shape.kv_heads; head++) {
        const size_t at = (static_cast<size_t>(i) * a.shape.kv_heads + head) * dim;
        std::copy(k + at, k + at + dim, padded.begin());
        a.kernels.store_kv(a.kv[0].keys, slots[i], head, padded.data());
        std::copy(v + at, v + at + dim, padded.begin());
        a.kernels.store_kv(a.kv[0].values, slots[i], head, padded.data());
      }
    return 0;
  });
}

// q, out [n][heads][head_dim]; q is scaled here.
API int phloem_attention_run(void* attention, int rows, const int32_t* counts,
                             const int32_t* lengths, const int32_t* const* slots, const float* q,
                             float* out) {
  return guarded(-1, [&] {
    auto& a = *static_cast<Reference*>(attention);
    const auto all = sequence_rows(rows, counts, lengths, slots);
    const int n = all.back().query + all.back().count;
    const int dim = a.shape.head_dim, padded = a.shape.padded_dim(), heads = a.shape.heads;
    std::vector<float> queries(static_cast<size_t>(n) * heads * padded, 0.0f);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int i = 0; i < n * heads; i++)
      for (int d = 0; d < dim; d++)
        queries[static_cast<size_t>(i) * padded + d] = q[static_cast<size_t>(i) * dim + d] * scale;
    Activations attended(heads * dim, n);
    a.attention.plan(all);
    a.team.run(1, [&](Member& me) { a.attention.run(me, a.kv[0], queries.data(), attended); });
    for (int i = 0; i < n; i++)
      std::memcpy(out + static_cast<size_t>(i) * heads * dim, attended.row(i),
                  static_cast<size_t>(heads) * dim * sizeof(float));
    return 0;
  });
}

API void* phloem_decoder_new(const DecoderSpec* spec, const void* kernels, void* team) {
  return guarded<void*>(nullptr, [&] {
    return new Decoder(*spec, *static_cast<const Kernels*>(kernels), *static_cast<Team*>(team));
  });
}

API void phloem_decoder_delete(void* decoder) { delete static_cast<Decoder*>(decoder); }

API int phloem_decoder_step(void* decoder, int count, const int32_t* tokens,
                            const int32_t* positions, int rows, const int32_t* counts,
                            const int32_t* lengths, const int32_t* const* slots, float* hidden) {
  return guarded(-1, [&] {
    auto& d = *static_cast<Decoder*>(decoder);
    for (int i = 0; i < count; i++) {
      if (tokens[i] < 0 || tokens[i] >= d.spec().vocab)
        throw std::out_of_range("token " + std::to_string(tokens[i]) + " is not in the vocabulary");
      if (positions[i] < 0 || positions[i] >= d.spec().context)
        throw std::out_of_range("position " + std::to_string(positions[i]) +
                                " is not in the context");
    }
    d.step(count, tokens, positions, sequence_rows(rows, counts, lengths, slots), hidden);
    return 0;
  });
}

API int phloem_decoder_logits(void* decoder, int count, const float* hidden,
                              const int32_t* const* masks, float* out) {
  return guarded(-1, [&] {
    static_cast<Decoder*>(decoder)->logits(count, hidden, masks, out);
    return 0;
  });
}

API int64_t phloem_decoder_kv_slot_bytes(const void* decoder) {
  return static_cast<int64_t>(static_cast<const Decoder*>(decoder)->kv().slot_bytes());
}

API int phloem_decoder_read_kv(const void* decoder, int count, const int32_t* slots, uint8_t* out) {
  return guarded(-1, [&] {
    const auto& d = *static_cast<const Decoder*>(decoder);
    check_slots(d, slots, count);
    d.kv().read(slots, count, out);
    return 0;
  });
}

API int phloem_decoder_write_kv(void* decoder, int count, const int32_t* slots,
                                const uint8_t* data) {
  return guarded(-1, [&] {
    auto& d = *static_cast<Decoder*>(decoder);
    check_slots(d, slots, count);
    d.kv().write(slots, count, data);
    return 0;
  });
}
