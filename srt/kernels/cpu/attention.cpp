#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace phloem {
namespace {

// Queries up to which a row has its chunks in parallel, at least; else as many as a call takes.
constexpr int SHORT_ROW = 4;

}  // namespace

Attention::Attention(const AttentionShape& shape, KvType type, const Kernels& kernels, int members)
    : shape_(shape),
      kernels_(kernels),
      queries_(kernels.attend_queries(type, shape.padded_dim())),
      scratch_stride_((attend_scratch(shape.padded_dim()) +
                       static_cast<size_t>(queries_) * shape.padded_dim() + 63) /
                      16 * 16),
      scratch_(scratch_stride_ * static_cast<size_t>(members)) {}

void Attention::plan(const std::vector<SequenceRow>& rows) {
  rows_ = rows;
  short_.clear();
  chunks_.clear();
  tasks_.clear();
  size_t partials = 0;
  const int short_row = std::max(SHORT_ROW, queries_ / shape_.group());
  for (size_t i = 0; i < rows_.size(); i++) {
    if (rows_[i].count <= short_row)
      plan_short(rows_[i]);
    else
      plan_long(static_cast<int>(i));
  }
  for (int c = 0; c < static_cast<int>(chunks_.size()); c++)
    for (int head = 0; head < shape_.kv_heads; head++) tasks_.push_back({head, c, 0, 0, 0});
  left_size_ = 0;
  for (ShortQuery& query : short_) {
    query.partial = static_cast<int>(partials);
    query.left = left_size_;
    partials += static_cast<size_t>(query.chunks) * shape_.heads;
    left_size_ += shape_.kv_heads;
  }
  if (left_size_ > left_capacity_) {
    left_capacity_ = left_size_;
    left_ = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(left_capacity_));
  }
  for (const ShortQuery& query : short_)
    for (int head = 0; head < shape_.kv_heads; head++) left_[query.left + head] = query.chunks;
  const size_t dim = static_cast<size_t>(shape_.padded_dim());
  if (partial_sums_.size() < partials * dim) partial_sums_.resize(partials * dim);
  partials_.resize(partials);
  for (size_t i = 0; i < partials; i++) partials_[i] = {0, 0, partial_sums_.data() + i * dim};
}

void Attention::plan_short(const SequenceRow& row) {
  const int first_position = row.length - row.count;
  const int lowest = shape_.first_seen(first_position);
  const int first_chunk = lowest / CHUNK, last_chunk = (row.length - 1) / CHUNK;
  const int base = static_cast<int>(short_.size());
  for (int i = 0; i < row.count; i++) {
    const int position = first_position + i;
    const int low = shape_.first_seen(position);
    short_.push_back(
        {row.query + i, position, low / CHUNK, position / CHUNK - low / CHUNK + 1, 0, 0});
  }
  const int most = std::max(1, queries_ / shape_.group());
  for (int c = first_chunk; c <= last_chunk; c++) {
    const int32_t* slots = row.slots + c * CHUNK;
    const int count = std::min(CHUNK, row.length - c * CHUNK);
    Chunk* shared = nullptr;
    if (count == CHUNK)
      for (Chunk& chunk : chunks_)
        if (chunk.index == c && chunk.count == CHUNK &&
            static_cast<int>(chunk.queries.size()) + row.count <= most &&
            chunk.slots[0] == slots[0] && chunk.slots[CHUNK - 1] == slots[CHUNK - 1] &&
            std::memcmp(chunk.slots, slots, CHUNK * sizeof(int32_t)) == 0) {
          shared = &chunk;
          break;
        }
    if (!shared) {
      chunks_.push_back({slots, c, count, {}});
      shared = &chunks_.back();
    }
    for (int i = 0; i < row.count; i++) {
      const ShortQuery& query = short_[static_cast<size_t>(base + i)];
      if (c < query.first_chunk || c >= query.first_chunk + query.chunks) continue;
      if (static_cast<int>(shared->queries.size()) == most) {
        chunks_.push_back({slots, c, count, {}});
        shared = &chunks_.back();
      }
      shared->queries.push_back(base + i);
    }
  }
}

void Attention::plan_long(int index) {
  const SequenceRow& row = rows_[static_cast<size_t>(index)];
  const int tile = std::max(1, queries_ / shape_.group());
  // The last tiles see the most keys: they go first.
  for (int first = (row.count - 1) / tile * tile; first >= 0; first -= tile)
    for (int head = 0; head < shape_.kv_heads; head++)
      tasks_.push_back({head, -1, index, first, std::min(tile, row.count - first)});
}

void Attention::run(Member& me, const KvLayer& kv, const float* q, Activations& out) {
  me.each(static_cast<int>(tasks_.size()), [&](int i) {
    const Task& task = tasks_[static_cast<size_t>(i)];
    if (task.chunk >= 0)
      run_chunk(me, task, kv, q, out);
    else
      run_tile(me, task, kv, q, out);
  });
}

// The part of a chunk that begins at position `begin` which the i-th query, at `position`, sees.
void Attention::see(AttendJob& job, int i, int position, int begin) const {
  job.end[i] = std::min(job.count, position + 1 - begin);
  job.first[i] = std::max(0, shape_.first_seen(position) - begin);
}

void Attention::write(const Softmax& softmax, float* out) const {
  kernels_.divide(softmax.sums, softmax.total, shape_.head_dim, out);
}

void Attention::run_chunk(Member& me, const Task& task, const KvLayer& kv, const float* q,
                          Activations& out) {
  const Chunk& chunk = chunks_[static_cast<size_t>(task.chunk)];
  const int group = shape_.group(), dim = shape_.padded_dim();
  const int per_call = std::max(1, queries_ / group);
  AttendJob job;
  job.keys = kv.keys;
  job.values = kv.values;
  job.head = task.head;
  job.slots = chunk.slots;
  job.count = chunk.count;
  job.soft_cap = shape_.soft_cap;
  job.scratch = scratch(me);
  const int queries = static_cast<int>(chunk.queries.size());
  for (int from = 0; from < queries; from += per_call) {
    for (int head_from = 0; head_from < group; head_from += queries_) {
      job.queries = 0;
      for (int i = from; i < std::min(queries, from + per_call); i++) {
        const ShortQuery& query = short_[static_cast<size_t>(chunk.queries[i])];
        for (int g = head_from; g < std::min(group, head_from + queries_); g++) {
          const int head = task.head * group + g, at = job.queries++;
          const int partial =
              query.partial + (chunk.index - query.first_chunk) * shape_.heads + head;
          Softmax& state = partials_[static_cast<size_t>(partial)];
          state.peak = -INFINITY;
          state.total = 0;
          std::fill(state.sums, state.sums + dim, 0.0f);
          job.query[at] = q + (static_cast<size_t>(query.query) * shape_.heads + head) * dim;
          job.state[at] = &state;
          see(job, at, query.position, chunk.index * CHUNK);
        }
      }
      kernels_.attend(job);
    }
  }
  for (int index : chunk.queries) {
    const ShortQuery& query = short_[static_cast<size_t>(index)];
    std::atomic<int>& left = left_[query.left + task.head];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    left.store(query.chunks, std::memory_order_relaxed);  // for the next layer
    for (int g = 0; g < group; g++) {
      const int head = task.head * group + g;
      Softmax& first = partials_[static_cast<size_t>(query.partial + head)];
      for (int c = 1; c < query.chunks; c++)
        kernels_.merge(first, partials_[static_cast<size_t>(query.partial + c * shape_.heads + head)],
                       dim);
      write(first, out.row(query.query) + head * shape_.head_dim);
    }
  }
}

void Attention::run_tile(Member& me, const Task& task, const KvLayer& kv, const float* q,
                         Activations& out) {
  const SequenceRow& row = rows_[static_cast<size_t>(task.row)];
  const int group = shape_.group(), dim = shape_.padded_dim();
  const int position = row.length - row.count + task.first, last = position + task.count - 1;
  const int lowest = shape_.first_seen(position);
  AttendJob job;
  job.keys = kv.keys;
  job.values = kv.values;
  job.head = task.head;
  job.soft_cap = shape_.soft_cap;
  job.scratch = scratch(me);
  float* sums = scratch(me) + attend_scratch(dim);
  for (int head_from = 0; head_from < group; head_from += queries_) {
    const int head_end = std::min(group, head_from + queries_);
    Softmax state[MAX_QUERIES];
    job.queries = 0;
    for (int i = 0; i < task.count; i++)
      for (int g = head_from; g < head_end; g++) {
        const int head = task.head * group + g, at = job.queries++;
        const size_t query = static_cast<size_t>(row.query + task.first + i);
        state[at] = {-INFINITY, 0, sums + static_cast<size_t>(at) * dim};
        std::fill(state[at].sums, state[at].sums + dim, 0.0f);
        job.query[at] = q + (query * shape_.heads + head) * dim;
        job.state[at] = &state[at];
      }
    for (int c = lowest / CHUNK; c <= last / CHUNK; c++) {
      job.slots = row.slots + c * CHUNK;
      job.count = std::min(CHUNK, last + 1 - c * CHUNK);
      for (int i = 0, at = 0; i < task.count; i++)
        for (int g = head_from; g < head_end; g++) see(job, at++, position + i, c * CHUNK);
      kernels_.attend(job);
    }
    for (int i = 0, at = 0; i < task.count; i++)
      for (int g = head_from; g < head_end; g++, at++)
        write(state[at], out.row(row.query + task.first + i) +
                             (task.head * group + g) * shape_.head_dim);
  }
}

}  // namespace phloem
