// Attention over a pool of KV slots, one slot a token, slots anywhere.
//
// A query meets the keys of its sequence in chunks of CHUNK, counted from position 0, and merges
// their softmaxes in order. That order is all that a result depends on, so the work may be cut as
// it suits:
//
// - a row of few queries (decode, or a short extend) has one task a chunk, so that a long sequence
//   keeps all threads busy; whoever finishes the last chunk of a query merges them;
// - rows whose sequences begin with the same slots (a shared prefix) share the tasks of those
//   chunks: their keys and values are read once for all;
// - a row of many queries (extend) has one task a tile of queries, which passes over all chunks.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "kv_pool.h"
#include "team.h"

namespace phloem {

struct AttentionShape {
  int heads, kv_heads, head_dim;
  int window;      // tokens that a query sees, itself included; 0: all
  float soft_cap;  // 0: none
  int group() const { return heads / kv_heads; }
  // The first position that a query at `position` sees.
  int first_seen(int position) const {
    return window && position >= window ? position - window + 1 : 0;
  }
  int padded_dim() const { return (head_dim + LANES - 1) / LANES * LANES; }
};

// A row's part of a step: `count` queries from flat index `query` on, the last ones of a sequence
// of `length` tokens whose KV is in `slots`.
struct SequenceRow {
  int query, count, length;
  const int32_t* slots;
};

class Attention {
 public:
  // For KV layers of `type`.
  Attention(const AttentionShape& shape, KvType type, const Kernels& kernels, int members);
  // Everything about a step that is the same in every layer.
  void plan(const std::vector<SequenceRow>& rows);
  // q [n][heads · padded_dim], scaled; out row i [heads · head_dim].
  void run(Member& me, const KvLayer& kv, const float* q, Activations& out);

 private:
  struct ShortQuery {  // a query of a short row
    int query, position, first_chunk, chunks;
    int partial;  // index of its first softmax: [chunks][heads]
    int left;     // index of its counters: [kv_heads]
  };
  struct Chunk {      // queries that see the same chunk of keys
    const int32_t* slots;
    int index, count;
    std::vector<int> queries;  // of short_
  };
  struct Task {
    int head;
    int chunk;              // of chunks_, or -1
    int row, first, count;  // else queries [first, first + count) of a row
  };
  void plan_short(const SequenceRow& row);
  void plan_long(int index);
  void run_chunk(Member& me, const Task& task, const KvLayer& kv, const float* q,
                 Activations& out);
  void run_tile(Member& me, const Task& task, const KvLayer& kv, const float* q,
                Activations& out);
  void see(AttendJob& job, int i, int position, int begin) const;
  void write(const Softmax& softmax, float* out) const;
  float* scratch(const Member& me) { return scratch_.data() + me.id() * scratch_stride_; }

  const AttentionShape shape_;
  const Kernels& kernels_;
  const int queries_;  // of a call
  const size_t scratch_stride_;
  StepVector<float> scratch_;
  std::vector<SequenceRow> rows_;
  std::vector<ShortQuery> short_;
  std::vector<Chunk> chunks_;
  std::vector<Task> tasks_;
  std::vector<Softmax> partials_;
  StepVector<float> partial_sums_;
  std::unique_ptr<std::atomic<int>[]> left_;
  int left_size_ = 0, left_capacity_ = 0;
};

}  // namespace phloem
