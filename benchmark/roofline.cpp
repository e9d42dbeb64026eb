// What roofline.py times: the machine (reading memory, multiplying in registers) and the kernels,
// each by itself, without Python between two repetitions.
//
// Compiled by roofline.py with -DROOFLINE_<isa>, and with the sources that cut work into tasks. The
// kernels are those of the installed library, called through their table: it has to be built from
// the headers that are here. Functions write the seconds of each repetition to `times` [capacity]
// and return how many there were, -1 if memory ran out.
#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <functional>
#include <new>
#include <numeric>
#include <random>
#include <vector>

#include "attention.h"
#include "decoder.h"
#include "formats.h"
#include "kernels.h"
#include "packing.h"
#include "target.h"
#include "team.h"

// As in the kernels' own files.
#if defined(ROOFLINE_avx512vnni) || defined(ROOFLINE_amx)
PHLOEM_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define PHLOEM_VNNI
#if defined(ROOFLINE_amx)
#define PHLOEM_ISA amx
#include "vector_avx512.h"
#include "tiles.h"
#else
#define PHLOEM_ISA avx512vnni
#include "vector_avx512.h"
#endif
#elif defined(ROOFLINE_avx512)
PHLOEM_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define PHLOEM_ISA avx512
#include "vector_avx512.h"
#elif defined(ROOFLINE_avxvnni)
PHLOEM_TARGET("avx2,fma,f16c,avxvnni")
#define PHLOEM_ISA avxvnni
#define PHLOEM_VNNI
#include "vector_avx2.h"
#elif defined(ROOFLINE_avx2)
PHLOEM_TARGET("avx2,fma,f16c")
#define PHLOEM_ISA avx2
#include "vector_avx2.h"
#else
#define ROOFLINE_PLAIN
#define PHLOEM_ISA generic
#include "vector_generic.h"
#endif

namespace phloem {
namespace PHLOEM_ISA {
namespace {

// Hides from the compiler that `v` stays the same; at no cost where it is a register.
template <class V>
inline void opaque(V& v) {
#if defined(ROOFLINE_PLAIN)
  asm volatile("" : "+m"(v));
#elif defined(ROOFLINE_avx2) || defined(ROOFLINE_avxvnni)
  asm volatile("" : "+x"(v));
#else
  asm volatile("" : "+v"(v));
#endif
}

// Results in flight: enough to hide an instruction's latency, few enough for the registers.
constexpr int STREAMS = QUERIES == 4 ? 8 : 4;
constexpr int IN_FLIGHT = QUERIES == 4 ? 12 : 6;

float read(const uint8_t* p, int64_t bytes) {
  f32x16 sums[STREAMS];
  for (int i = 0; i < STREAMS; i++) sums[i] = zero();
  for (int64_t at = 0; at + STREAMS * 64 <= bytes; at += STREAMS * 64)
    for (int i = 0; i < STREAMS; i++) {
      sums[i] = add(sums[i], load(reinterpret_cast<const float*>(p + at + i * 64)));
    }
  for (int i = 1; i < STREAMS; i++) sums[0] = add(sums[0], sums[i]);
  return sum(sums[0]);
}

#if defined(ROOFLINE_amx)
// Eight of a round; a tile's are 16 · 16 sums of 64 products, or of 32.
template <bool INT8>
float multiply_in_tiles(int count) {
  TileShapes shapes;
  for (int t = 0; t < 8; t++) shapes.set(t, TILE, 64);
  tiles_configure(shapes);
  for (int n = 0; n < 2 * count; n++) {
    if (INT8) {
      tile_dot_u8<0, 4, 6>();
      tile_dot_u8<1, 4, 6>();
      tile_dot_u8<2, 4, 6>();
      tile_dot_u8<3, 4, 6>();
    } else {
      tile_dot_bf16<0, 4, 6>();
      tile_dot_bf16<1, 4, 6>();
      tile_dot_bf16<2, 4, 6>();
      tile_dot_bf16<3, 4, 6>();
    }
  }
  tiles_release();
  return 0;
}
#endif

// Of a row's halves each counts: a dot product of both is two.
float multiply_int8(int count) {
  alignas(64) uint8_t bytes[2 * PLANE] = {3, 1, 4, 1, 5};
  s8_codes codes = load_s8_codes(bytes);
  row_run x = load_run(bytes, 0);
  code_sums sums[IN_FLIGHT];
  for (int i = 0; i < IN_FLIGHT; i++) sums[i] = no_sums();
  for (int n = 0; n < count / 2; n++) {
    asm volatile("" : "+m"(x));
    for (int i = 0; i < IN_FLIGHT; i++) sums[i] = dot(sums[i], codes, x);
  }
  f32x16 total = zero();
  for (int i = 0; i < IN_FLIGHT; i++) total = add(total, to_float(whole_sums(sums[i], splat_i32(0))));
  return sum(total);
}

float multiply_float32(int count) {
  f32x16 sums[IN_FLIGHT];
  for (int i = 0; i < IN_FLIGHT; i++) sums[i] = splat(static_cast<float>(i));
  const f32x16 factor = splat(0.5f), term = splat(1.0f);
  for (int n = 0; n < count; n++)
    for (int i = 0; i < IN_FLIGHT; i++) sums[i] = fma(sums[i], factor, term);
  for (int i = 1; i < IN_FLIGHT; i++) sums[0] = add(sums[0], sums[i]);
  return sum(sums[0]);
}

}  // namespace
}  // namespace PHLOEM_ISA
}  // namespace phloem

#if !defined(ROOFLINE_PLAIN)
PHLOEM_TARGET_END
#endif

#if defined(__x86_64__) && !defined(ROOFLINE_amx)
PHLOEM_TARGET("avx512f,avx512bf16")
static float multiply_bfloat16(int count) {
  __m512bh factor, x;
  std::memset(&factor, 0x3F, sizeof factor);
  std::memset(&x, 0x3F, sizeof x);
  __m512 sums[12];
  for (int i = 0; i < 12; i++) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int n = 0; n < count; n++)
    for (int i = 0; i < 12; i++) sums[i] = _mm512_dpbf16_ps(sums[i], factor, x);
  for (int i = 1; i < 12; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  return _mm512_cvtss_f32(sums[0]);
}
PHLOEM_TARGET_END
#endif

using namespace phloem;

namespace {

const Kernels* kernels = nullptr;

constexpr int LEAST = 3;                      // repetitions, however long they take
constexpr int64_t LEAST_READ = 8 << 20;       // bytes of a repetition
constexpr int ROUNDS = 20000;                 // of the loops that multiply

std::atomic<float> sink;  // what keeps results from being dropped

double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

template <class Body>
int guarded(Body&& body) {
  try {
    return body();
  } catch (const std::exception&) {
    return -1;
  }
}

// Runs body(me, i), of one phase, on `threads` threads for i = 0, 1, …, some `seconds` long: short
// ones many in a job, as phases follow each other in a step. A time is that of a job, divided by its
// repetitions. The first job is not counted.
template <class Body>
int timed(int threads, double seconds, double* times, int capacity, Body&& body) {
  constexpr double JOB_SECONDS = 0.002;
  constexpr int MOST = 64;
  Team team(threads);
  int next = 0, repetitions = 1, done = 0;
  const double deadline = now() + seconds;
  do {
    const double begin = now();
    const std::function<void(Member&)> job = [&](Member& me) {
      for (int i = 0; i < repetitions; i++) body(me, next + i);
    };
    team.start(repetitions, job);
    const double each = (now() - begin) / repetitions;
    team.settle();
    if (next > 0) times[done++] = each;
    next += repetitions;
    repetitions = std::max(1, std::min(MOST, static_cast<int>(JOB_SECONDS / each)));
  } while (done < capacity && (done < LEAST || now() < deadline));
  return done;
}

// Memory in large pages where the system has them.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    data = static_cast<uint8_t*>(p);
  }
  ~Buffer() { munmap(data, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  uint8_t* data;

 private:
  size_t bytes_;
};

std::mt19937& random_bits() {
  static std::mt19937 generator(1);
  return generator;
}

float random_float() { return static_cast<float>(random_bits()() & 65535) / 32768.0f - 1.0f; }

void randomise(float* x, size_t n) {
  for (size_t i = 0; i < n; i++) x[i] = random_float();
}

Activations random_activations(int columns, int rows) {
  Activations x(columns, rows);
  for (int i = 0; i < rows; i++) {
    randomise(x.row(i), static_cast<size_t>(columns));
    kernels->quantize(x.row(i), columns, x.quantized(i));
  }
  return x;
}

size_t copies_in(int64_t working_set, size_t bytes) {
  return std::max<size_t>(1, (static_cast<size_t>(working_set) + bytes - 1) / bytes);
}

// Copies of one matrix that fill a working set, so that none stays in a core's own cache.
struct Weights {
  Weights(const Format& format, int rows, int columns, int64_t working_set)
      : first(new_matrix(format, false, rows, columns), delete_matrix) {
    if (!first) throw std::bad_alloc();
    fill(format, rows, columns);
    const size_t bytes = first->bytes(), count = copies_in(working_set, bytes);
    buffer = std::make_unique<Buffer>(bytes * count);
    for (size_t i = 0; i < count; i++) {
      copies.push_back(*first);
      copies.back().data = buffer->data + i * bytes;
      std::memcpy(copies.back().data, first->data, bytes);
    }
  }

  // Any two bytes from 0x20 to 0x3B are an ordinary float16, so that no scale is infinite.
  void fill(const Format& format, int rows, int columns) {
    const int row_bytes = columns / format.elements * format.bytes;
    std::vector<uint8_t> data(static_cast<size_t>(rows) * static_cast<size_t>(row_bytes));
    if (format.bytes == 4 && format.elements == 1)
      randomise(reinterpret_cast<float*>(data.data()), data.size() / 4);
    else
      for (uint8_t& byte : data) byte = static_cast<uint8_t>(0x20 + random_bits()() % 28);
    std::vector<int32_t> order(static_cast<size_t>(rows));
    std::iota(order.begin(), order.end(), 0);
    Team alone(1);
    pack(format, data.data(), row_bytes, order.data(), alone, *first);
  }

  std::unique_ptr<Matrix, void (*)(Matrix*)> first;
  std::unique_ptr<Buffer> buffer;
  std::vector<Matrix> copies;
};

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Which kernels to time: what phloem_kernels gave.
API void roofline_use(const void* table) { kernels = static_cast<const Kernels*>(table); }

// Seconds to read `bytes` once; small buffers are read several times a repetition.
API int roofline_read(int64_t bytes, int threads, double seconds, double* times, int capacity) {
  return guarded([&] {
    Buffer buffer(static_cast<size_t>(bytes));
    std::memset(buffer.data, 1, static_cast<size_t>(bytes));
    const int64_t part = bytes / threads, passes = std::max<int64_t>(1, LEAST_READ / bytes);
    const int done = timed(threads, seconds, times, capacity, [&](Member& me, int) {
      me.each(threads, [&](int i) {
        float sum = 0;
        for (int64_t pass = 0; pass < passes; pass++) {
          sum += PHLOEM_ISA::read(buffer.data + i * part, part);
          asm volatile("" ::: "memory");  // it might have changed: read it again
        }
        sink = sum;
      });
    });
    for (int i = 0; i < done; i++) times[i] /= static_cast<double>(passes);
    return done;
  });
}

// Seconds a multiply-add, all threads together. `type`: "int8" and "float32" with the instructions
// that the kernels use, "bfloat16"; no repetitions where there are no such
// instructions.
API int roofline_multiply(const char* type, int threads, double seconds, double* times,
                          int capacity) {
  return guarded([&] {
    float (*multiply)(int) = nullptr;
    double each = 0;  // multiply-adds of a round
    if (std::strcmp(type, "int8") == 0) {
      multiply = PHLOEM_ISA::multiply_int8;
      each = PHLOEM_ISA::IN_FLIGHT * 64;
    } else if (std::strcmp(type, "float32") == 0) {
      multiply = PHLOEM_ISA::multiply_float32;
      each = PHLOEM_ISA::IN_FLIGHT * 16;
    }
#if defined(ROOFLINE_amx)
    if (std::strcmp(type, "float32") != 0) {
      const bool int8 = std::strcmp(type, "int8") == 0;
      multiply = int8 ? PHLOEM_ISA::multiply_in_tiles<true> : PHLOEM_ISA::multiply_in_tiles<false>;
      each = 8 * 16 * 16 * (int8 ? 64 : 32);
    }
#elif defined(__x86_64__)
    if (std::strcmp(type, "bfloat16") == 0 && __builtin_cpu_supports("avx512bf16")) {
      multiply = multiply_bfloat16;
      each = 12 * 32;
    }
#endif
    if (!multiply) return 0;
    const int done = timed(threads, seconds, times, capacity, [&](Member& me, int) {
      me.each(threads, [&](int) { sink = multiply(ROUNDS); });
    });
    for (int i = 0; i < done; i++) times[i] /= each * ROUNDS * threads;
    return done;
  });
}

// Null if there is no such format for such rows, or no memory.
API void* roofline_weights_new(const char* name, int rows, int columns, int64_t working_set) {
  const Format* format = find_format(name);
  if (!format || columns % format->elements) return nullptr;
  try {
    return new Weights(*format, rows, columns, working_set);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

API void roofline_weights_delete(void* weights) { delete static_cast<Weights*>(weights); }

API int64_t roofline_weights_bytes(const void* weights) {
  return static_cast<int64_t>(static_cast<const Weights*>(weights)->first->bytes());
}

// A product of `count` rows with the next copy of the weights, cut into tasks as a decoder does.
API int roofline_product(const void* weights, int count, int threads, double seconds, double* times,
                         int capacity) {
  return guarded([&] {
    const auto& copies = static_cast<const Weights*>(weights)->copies;
    const Activations x = random_activations(copies[0].columns, count);
    std::vector<int> rows(static_cast<size_t>(count));
    std::iota(rows.begin(), rows.end(), 0);
    constexpr int OUT = ROWS * WIDE * LANES;
    std::vector<float> out(static_cast<size_t>(threads) * OUT);
    return timed(threads, seconds, times, capacity, [&](Member& me, int i) {
      const Matrix& w = copies[static_cast<size_t>(i) % copies.size()];
      const int blocks = w.blocks();
      me.each((blocks + WIDE - 1) / WIDE, [&](int task) {
        const int begin = task * WIDE, end = std::min(blocks, begin + WIDE);
        for (int from = 0; from < count; from += ROWS)
          kernels->gemm(w, begin, end, x, rows.data() + from, std::min(ROWS, count - from),
                       out.data() + me.id() * OUT, (end - begin) * LANES);
      });
    });
  });
}

// Attention of `rows` sequences of `length` tokens, the last `count` of each asking; slots in
// random order; layers change from one repetition to the next and fill the working set.
API int roofline_attention(int heads, int kv_heads, int head_dim, int kv_type, int rows, int count,
                           int length, int64_t working_set, int threads, double seconds,
                           double* times, int capacity) {
  return guarded([&] {
    const AttentionShape shape{heads, kv_heads, head_dim, 0, 0};
    const auto type = static_cast<KvType>(kv_type);
    const int slots = 1 + rows * length, dim = shape.padded_dim();
    const size_t element = type == KvType::F32 ? 4 : type == KvType::S8 ? 1 : 2;
    const size_t vectors = 2 * static_cast<size_t>(rows) * length * kv_heads;
    const auto layers = static_cast<int>(copies_in(working_set, vectors * dim * element));
    const KvPool pool(kv_heads, dim, type, layers, slots);
    std::vector<float> vector(static_cast<size_t>(dim));
    for (int layer = 0; layer < layers; layer++) {
      randomise(vector.data(), static_cast<size_t>(head_dim));
      for (int slot = 1; slot < slots; slot++)
        for (int head = 0; head < kv_heads; head++) {
          vector[static_cast<size_t>((slot + head) % head_dim)] = random_float();
          kernels->store_kv(pool[layer].keys, slot, head, vector.data());
          kernels->store_kv(pool[layer].values, slot, head, vector.data());
        }
    }
    std::vector<int32_t> places(static_cast<size_t>(slots - 1));
    std::iota(places.begin(), places.end(), 1);
    std::shuffle(places.begin(), places.end(), random_bits());
    std::vector<SequenceRow> sequences;
    for (int i = 0; i < rows; i++)
      sequences.push_back({i * count, count, length, places.data() + i * length});
    std::vector<float> q(static_cast<size_t>(rows) * count * heads * dim);
    for (size_t i = 0; i < q.size(); i += static_cast<size_t>(dim))
      randomise(q.data() + i, static_cast<size_t>(head_dim));
    Activations out(heads * head_dim, rows * count);
    Attention attention(shape, type, *kernels, threads);
    attention.plan(sequences);
    return timed(threads, seconds, times, capacity, [&](Member& me, int i) {
      attention.run(me, pool[static_cast<size_t>(i % layers)], q.data(), out);
    });
  });
}

// RMSNorm and quantisation of rows of `columns`.
API int roofline_norm(int columns, int rows, int threads, double seconds, double* times,
                      int capacity) {
  return guarded([&] {
    const Activations x = random_activations(columns, rows);
    Activations out(columns, rows);
    const std::vector<float> weight(static_cast<size_t>(columns), 1.0f);
    return timed(threads, seconds, times, capacity, [&](Member& me, int) {
      me.each(rows, [&](int i) {
        kernels->rms_norm(x.row(i), weight.data(), columns, 1e-5f, out.row(i));
        kernels->quantize(out.row(i), columns, out.quantized(i));
      });
    });
  });
}
