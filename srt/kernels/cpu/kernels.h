// The table of kernels, one for each instruction set that was compiled.
#pragma once
#include <cstddef>
#include <cstdint>

#include "activations.h"
#include "matrix.h"

namespace phloem {

constexpr int CHUNK = 256;       // keys whose softmax is taken together, counted from position 0
constexpr int MAX_QUERIES = 128;  // query vectors of one call of `attend`, at most
constexpr int VECTOR_QUERIES = 32;  // as many as the kernels without tiles take

enum class KvType : int { F32 = 0, F16 = 1, BF16 = 2, S8 = 3 };

constexpr int KV_RUN = 256;  // slots that lie one after another

// One layer's keys or values, in runs of [KV_RUN slots][heads][dim]; S8 with one scale a slot and head.
struct KvArray {
  KvType type;
  uint8_t* data;
  float* scales;
  int heads, dim;  // dim is padded to a multiple of 16
  size_t slot_bytes;
  size_t run_bytes, run_scales;  // from a run to the next one
  uint8_t* slot(int32_t i) const {
    const auto at = static_cast<uint32_t>(i);
    return data + at / KV_RUN * run_bytes + at % KV_RUN * slot_bytes;
  }
  float* slot_scales(int32_t i) const {
    const auto at = static_cast<uint32_t>(i);
    return scales + at / KV_RUN * run_scales + at % KV_RUN * static_cast<size_t>(heads);
  }
};

// Softmax over keys seen so far: peak score, Σ exp(score - peak), and the same sum over values.
struct Softmax {
  float peak, total;
  float* sums;  // [dim]
};

// Queries of one KV head against one chunk of keys.
struct AttendJob {
  KvArray keys, values;
  int head;
  const int32_t* slots;  // of the chunk
  int count;             // keys in the chunk, 1..CHUNK
  float soft_cap;        // 0: none
  int queries;           // 1..MAX_QUERIES
  const float* query[MAX_QUERIES];  // [dim], scaled
  int first[MAX_QUERIES], end[MAX_QUERIES];  // keys of the chunk that a query sees
  Softmax* state[MAX_QUERIES];               // what the chunk is merged into
  float* scratch;                            // attend_scratch(dim) floats, 64-byte aligned
};

// For the vector kernels: a tile of keys twice, scores, sums; for AMX: keys and values as
// tiles, and a tile's queries, scores and sums.
constexpr size_t attend_scratch(int dim) {
  const size_t d = static_cast<size_t>(dim);
  const size_t vectors = 2 * LANES * d + VECTOR_QUERIES * (CHUNK + d);
  const size_t tiles = CHUNK * d + LANES * (2 * (CHUNK + LANES) + 3 * d);
  return (vectors > tiles ? vectors : tiles) + 256;
}

struct Kernels {
  const char* name;
  // Quantises x [columns] into `out`.
  void (*quantize)(const float* x, int columns, const QuantizedRow& out);
  // x / √(mean(x²) + ε) · w.
  void (*rms_norm)(const float* x, const float* w, int n, float eps, float* out);
  // out[i · stride + 16 · (b - begin) + lane] = row rows[i] of x (row i if rows is null) times
  // row 16·b + lane of w, for blocks [begin, end) and i in [0, count).
  void (*gemm)(const Matrix& w, int begin, int end, const Activations& x, const int* rows,
               int count, float* out, ptrdiff_t stride);
  // out = silu(gate) · up, n a multiple of 16.
  void (*silu_and_mul)(const float* gate, const float* up, int n, float* out);
  // out[i] = x[i] / by
  void (*divide)(const float* x, float by, int n, float* out);
  // x[i] += y[i], n a multiple of 16.
  void (*accumulate)(float* x, const float* y, int n);
  // Rotates the pairs (i, i + half) of x.
  void (*rotate)(float* x, const float* cos, const float* sin, int half);
  // Writes x [dim] to (slot, head).
  void (*store_kv)(const KvArray& kv, int slot, int head, const float* x);
  // Queries that a call of `attend` may have, for keys of this type and padded size.
  int (*attend_queries)(KvType type, int dim);
  void (*attend)(AttendJob& job);
  // Merges the softmax over later keys into the one over earlier keys.
  void (*merge)(Softmax& into, const Softmax& later, int dim);
};

extern const Kernels generic_kernels, avx2_kernels, avxvnni_kernels, avx512_kernels,
    avx512vnni_kernels, amx_kernels;

// Older compilers, and the assemblers of their time, know neither. The system has to be asked for
// tiles; how is known for Linux.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define PHLOEM_HAS_AVXVNNI
#if defined(__linux__)
#define PHLOEM_HAS_AMX
#endif
#endif

// The kernels called `name`; the best that this CPU has if it is null or empty. Null if there are
// none of that name or this CPU cannot run them.
const Kernels* find_kernels(const char* name);
// Names of all that this CPU can run, best first, separated by spaces.
const char* runnable_kernels();

}  // namespace phloem
