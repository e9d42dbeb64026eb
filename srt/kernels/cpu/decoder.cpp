#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace phloem {
namespace {

// Tokens that pass through all layers together: second-level caches hold what they leave.
constexpr int TOGETHER = 512;
constexpr int FEW = 4;         // rows up to which every member prepares all of them for itself
constexpr int OWN_ROWS = 64;   // rows for each member from which on members take them through layers
constexpr int OWN_MOST = 128;  // alone, at most so many at once
constexpr int PHASES = 10;     // of a layer, at most
constexpr int HEAD_WIDE = 16;  // blocks of a task of the head

int tasks_of(const Matrix& w) { return (w.blocks() + WIDE - 1) / WIDE; }

AttentionShape shape_of(const DecoderSpec& spec) {
  return {spec.heads, spec.kv_heads, spec.head_dim, spec.window, spec.soft_cap};
}

bool integer(std::initializer_list<const Matrix*> matrices) {
  return std::any_of(matrices.begin(), matrices.end(),
                     [](const Matrix* m) { return m->integer(); });
}

}  // namespace

Decoder::Decoder(const DecoderSpec& spec, const Kernels& kernels, Team& team)
    : spec_(spec),
      layers_(spec.layer, spec.layer + spec.layers),
      shape_(shape_of(spec)),
      kernels_(kernels),
      team_(team),
      kv_(spec.kv_heads, shape_.padded_dim(), static_cast<KvType>(spec.kv_type), spec.layers,
          spec.slots),
      attention_(shape_, static_cast<KvType>(spec.kv_type), kernels, team.size()),
      x_(spec.hidden, 0),
      normed_(spec.hidden, 0),
      attended_(spec.heads * spec.head_dim, 0),
      gated_(spec.intermediate, 0),
      head_input_(spec.hidden, 0),
      temporary_stride_(static_cast<size_t>(ROWS) *
                        std::max(2 * WIDE * LANES, std::max(shape_.padded_dim(), HEAD_WIDE * LANES))),
      temporary_(temporary_stride_ * static_cast<size_t>(team.size())),
      step_job_([this](Member& me) { compute(me); }),
      head_job_([this](Member& me) { compute_logits(me); }) {
  for (int i = 0; i < team.size(); i++)
    own_.push_back(
        {{spec.hidden, FEW}, {spec.heads * spec.head_dim, FEW}, {spec.intermediate, FEW}});
}

void Decoder::reserve(int count) {
  if (count <= capacity_) return;
  capacity_ = std::max(count, 2 * capacity_);
  x_.reserve(capacity_);
  normed_.reserve(capacity_);
  attended_.reserve(capacity_);
  gated_.reserve(capacity_);
  q_.resize(static_cast<size_t>(capacity_) * spec_.heads * shape_.padded_dim());
  slot_.resize(static_cast<size_t>(capacity_));
  identity_.resize(static_cast<size_t>(capacity_));
  for (int i = 0; i < capacity_; i++) identity_[static_cast<size_t>(i)] = i;
}

void Decoder::step(int count, const int32_t* tokens, const int32_t* positions,
                   const std::vector<SequenceRow>& rows, float* hidden) {
  for (int from = 0; from < count; from += TOGETHER) {
    const int some = std::min(TOGETHER, count - from);
    compute_part(some, tokens + from, positions + from, part_of(rows, from, some),
                 hidden + static_cast<size_t>(from) * spec_.hidden);
  }
}

// Tokens [from, from + count) of the rows that follow each other in `rows`.
std::vector<SequenceRow> Decoder::part_of(const std::vector<SequenceRow>& rows, int from,
                                          int count) {
  std::vector<SequenceRow> part;
  for (const SequenceRow& row : rows) {
    const int begin = std::max(row.query, from);
    const int end = std::min(row.query + row.count, from + count);
    if (begin >= end) continue;
    part.push_back(row);
    part.back().query = begin - from;
    part.back().count = end - begin;
    part.back().length = row.length - (row.query + row.count - end);
  }
  return part;
}

void Decoder::compute_part(int count, const int32_t* tokens, const int32_t* positions,
                           const std::vector<SequenceRow>& rows, float* hidden) {
  team_.settle();
  reserve(count);
  count_ = count;
  tokens_ = tokens;
  positions_ = positions;
  hidden_ = hidden;
  for (const SequenceRow& row : rows)
    std::copy(row.slots + row.length - row.count, row.slots + row.length,
              slot_.begin() + row.query);
  attention_.plan(rows);
  const int fair = (count / team_.size() + LANES - 1) / LANES * LANES;
  group_ = count >= OWN_ROWS * team_.size() ? std::min(fair, OWN_MOST) : 0;
  team_.start(PHASES * spec_.layers + 2, step_job_);
}

void Decoder::compute(Member& me) {
  if (group_)
    compute_by_rows(me);
  else
    compute_by_columns(me);
  me.each(count_, [&](int i) {
    kernels_.rms_norm(x_.row(i), spec_.norm, spec_.hidden, spec_.eps,
                      hidden_ + static_cast<size_t>(i) * spec_.hidden);
  });
}

// Groups of rows pass from one attention to the next with one member each, so that what is written of
// a row is read from the same core's caches.
void Decoder::compute_by_rows(Member& me) {
  for (size_t i = 0; i <= layers_.size(); i++) {
    if (i > 0) attention_.run(me, kv_[i - 1], q_.data(), attended_);
    me.each((count_ + group_ - 1) / group_, [&](int g) {
      const RowRange rows{g * group_, std::min(count_, (g + 1) * group_)};
      if (i == 0)
        for (int row = rows.begin; row < rows.end; row++)
          read_row(*spec_.embedding, tokens_[row], x_.row(row));
      else
        finish_layer(me, layers_[i - 1], rows);
      if (i < layers_.size()) begin_layer(me, layers_[i], kv_[i], rows);
    });
  }
}

void Decoder::begin_layer(Member& me, const LayerSpec& layer, const KvLayer& kv, RowRange rows) {
  const bool integer_qkv = integer({layer.q, layer.k, layer.v});
  for (int i = rows.begin; i < rows.end; i++) normalise(i, layer.attention_norm, integer_qkv, normed_);
  for (int index = 0; index < spec_.heads + 2 * spec_.kv_heads; index++)
    head(me, layer, normed_, kv, index, rows);
}

void Decoder::finish_layer(Member& me, const LayerSpec& layer, RowRange rows) {
  const auto product = [&](const Matrix& w, Activations& x, const float* bias) {
    for (int i = rows.begin; w.integer() && i < rows.end; i++)
      kernels_.quantize(x.row(i), x.columns(), x.quantized(i));
    for (int task = 0; task < tasks_of(w); task++) add_product(me, w, x, bias, task, rows);
  };
  product(*layer.o, attended_, layer.o_bias);
  const bool integer_mlp = integer({layer.gate, layer.up});
  for (int i = rows.begin; i < rows.end; i++) normalise(i, layer.mlp_norm, integer_mlp, normed_);
  for (int task = 0; task < tasks_of(*layer.gate); task++)
    gate_and_up(me, layer, normed_, task, rows);
  product(*layer.down, gated_, nullptr);
}

void Decoder::compute_by_columns(Member& me) {
  const RowRange all{0, count_};
  embed(me);
  for (size_t i = 0; i < layers_.size(); i++) {
    const LayerSpec& layer = layers_[i];
    const int heads = spec_.heads + 2 * spec_.kv_heads;
    const bool integer_qkv = integer({layer.q, layer.k, layer.v});
    const Activations& x = normalised(me, layer.attention_norm, integer_qkv, heads);
    me.each(heads, [&](int index) { head(me, layer, x, kv_[i], index, all); });
    attention_.run(me, kv_[i], q_.data(), attended_);
    add_product(me, *layer.o, quantized(me, &Own::attended, attended_, *layer.o), layer.o_bias);
    const bool integer_mlp = integer({layer.gate, layer.up});
    const int tasks = tasks_of(*layer.gate);
    const Activations& y = normalised(me, layer.mlp_norm, integer_mlp, tasks);
    me.each(tasks, [&](int task) { gate_and_up(me, layer, y, task, all); });
    add_product(me, *layer.down, quantized(me, &Own::gated, gated_, *layer.down), nullptr);
  }
}

void Decoder::add_product(Member& me, const Matrix& w, const Activations& x, const float* bias) {
  me.each(tasks_of(w), [&](int task) { add_product(me, w, x, bias, task, {0, count_}); });
}

void Decoder::embed(Member& me) {
  me.each(count_, [&](int i) { read_row(*spec_.embedding, tokens_[i], x_.row(i)); });
}

// prepare(i, out) for every row i, for the `tasks` that follow. Few rows are cheaper prepared by
// every member for itself, in its `own`, than waited for.
template <class Prepare>
const Activations& Decoder::prepared(Member& me, Activations Own::* own, Activations& shared,
                                     int tasks, Prepare&& prepare) {
  if (count_ > FEW) {
    me.each(count_, [&](int i) { prepare(i, shared); });
    return shared;
  }
  Activations& out = own_[static_cast<size_t>(me.id())].*own;
  if (!me.late(tasks))
    for (int i = 0; i < count_; i++) prepare(i, out);
  return out;
}

// The norm of every row, for the `tasks` that follow.
const Activations& Decoder::normalised(Member& me, const float* weight, bool integer, int tasks) {
  return prepared(me, &Own::normed, normed_, tasks, [&](int i, Activations& out) {
    normalise(i, weight, integer, out);
  });
}

void Decoder::normalise(int i, const float* weight, bool integer, Activations& out) {
  kernels_.rms_norm(x_.row(i), weight, spec_.hidden, spec_.eps, out.row(i));
  if (integer) kernels_.quantize(out.row(i), spec_.hidden, out.quantized(i));
}

// The rows of `shared`, quantised if the product with w that follows is one of integers.
const Activations& Decoder::quantized(Member& me, Activations Own::* own, Activations& shared,
                                      const Matrix& w) {
  if (!w.integer()) return shared;
  return prepared(me, own, shared, tasks_of(w), [&](int i, Activations& out) {
    kernels_.quantize(shared.row(i), shared.columns(), out.quantized(i));
  });
}

// One head of q, k or v for some rows: product, bias, norm, rotation; then into its place.
void Decoder::head(Member& me, const LayerSpec& layer, const Activations& input, const KvLayer& kv,
                   int index, RowRange some) {
  const int dim = shape_.padded_dim(), half = spec_.head_dim / 2;
  const bool is_q = index < spec_.heads, is_v = index >= spec_.heads + spec_.kv_heads;
  const int own = is_q ? index : (index - spec_.heads) % spec_.kv_heads;
  const Matrix& w = is_q ? *layer.q : is_v ? *layer.v : *layer.k;
  const float* bias = is_q ? layer.q_bias : is_v ? layer.v_bias : layer.k_bias;
  const float* norm = is_q ? layer.q_norm : is_v ? nullptr : layer.k_norm;
  const float scale = 1.0f / std::sqrt(static_cast<float>(spec_.head_dim));
  const int blocks = dim / LANES;
  float* product = temporary(me);
  for (int from = some.begin; from < some.end; from += ROWS) {
    const int rows = std::min(ROWS, some.end - from);
    kernels_.gemm(w, own * blocks, (own + 1) * blocks, input, identity_.data() + from, rows,
                  product, dim);
    for (int i = 0; i < rows; i++) {
      float* x = product + i * dim;
      const int token = from + i;
      if (bias) kernels_.accumulate(x, bias + own * dim, dim);
      if (norm) kernels_.rms_norm(x, norm, spec_.head_dim, spec_.eps, x);
      if (!is_v) {
        const size_t at = static_cast<size_t>(positions_[token]) * half;
        kernels_.rotate(x, spec_.cos + at, spec_.sin + at, half);
      }
      if (is_q) {
        float* q = q_.data() + (static_cast<size_t>(token) * spec_.heads + own) * dim;
        for (int d = 0; d < dim; d++) q[d] = x[d] * scale;
      } else {
        kernels_.store_kv(is_v ? kv.values : kv.keys, slot_[static_cast<size_t>(token)], own, x);
      }
    }
  }
}

// x += w · input + bias, for the blocks of a task.
void Decoder::add_product(Member& me, const Matrix& w, const Activations& input, const float* bias,
                          int task, RowRange some) {
  const int begin = task * WIDE, end = std::min(w.blocks(), begin + WIDE);
  const int width = (end - begin) * LANES;
  float* product = temporary(me);
  for (int from = some.begin; from < some.end; from += ROWS) {
    const int rows = std::min(ROWS, some.end - from);
    kernels_.gemm(w, begin, end, input, identity_.data() + from, rows, product, width);
    for (int i = 0; i < rows; i++) {
      float* y = product + i * width;
      if (bias)
        for (int j = 0; j < width && begin * LANES + j < w.rows; j++) y[j] += bias[begin * LANES + j];
      kernels_.accumulate(x_.row(from + i) + begin * LANES, y, width);
    }
  }
}

void Decoder::gate_and_up(Member& me, const LayerSpec& layer, const Activations& x, int task,
                          RowRange some) {
  const int begin = task * WIDE, end = std::min(layer.gate->blocks(), begin + WIDE);
  const int width = (end - begin) * LANES;
  float* gate = temporary(me);
  float* up = gate + ROWS * width;
  for (int from = some.begin; from < some.end; from += ROWS) {
    const int rows = std::min(ROWS, some.end - from);
    const int* index = identity_.data() + from;
    kernels_.gemm(*layer.gate, begin, end, x, index, rows, gate, width);
    kernels_.gemm(*layer.up, begin, end, x, index, rows, up, width);
    for (int i = 0; i < rows; i++)
      kernels_.silu_and_mul(gate + i * width, up + i * width, width,
                            gated_.row(from + i) + begin * LANES);
  }
}

void Decoder::logits(int count, const float* hidden, const int32_t* const* masks, float* out) {
  team_.settle();
  head_input_.reserve(count);
  head_ = {count, hidden, masks, out};
  team_.start(2, head_job_);
}

void Decoder::compute_logits(Member& me) {
  const Matrix& w = *spec_.head;
  me.each(head_.count, [&](int i) {
    const float* x = head_.hidden + static_cast<size_t>(i) * spec_.hidden;
    if (w.integer())
      kernels_.quantize(x, spec_.hidden, head_input_.quantized(i));
    else
      std::copy(x, x + spec_.hidden, head_input_.row(i));
  });
  const int blocks = w.blocks();
  me.each((blocks + HEAD_WIDE - 1) / HEAD_WIDE, [&](int task) {
    const int begin = task * HEAD_WIDE, end = std::min(blocks, begin + HEAD_WIDE);
    if (head_.masks || end * LANES > spec_.vocab)
      some_logits(me, begin, end);
    else
      kernels_.gemm(w, begin, end, head_input_, nullptr, head_.count, head_.out + begin * LANES,
                    spec_.vocab);
  });
}

// Of blocks [begin, end), the logits of the rows whose masks have a token there; the others stay
// forbidden.
void Decoder::some_logits(Member& me, int begin, int end) {
  const int width = (end - begin) * LANES;
  const int tokens = std::min(width, spec_.vocab - begin * LANES);
  float* product = temporary(me);
  int rows[ROWS];
  for (int i = 0; i < head_.count;) {
    int wanted = 0;
    for (; i < head_.count && wanted < ROWS; i++) {
      const int32_t* mask = head_.masks ? head_.masks[i] : nullptr;
      int32_t any = mask == nullptr;
      for (int word = begin / 2; mask && word * 32 < begin * LANES + tokens; word++)
        any |= mask[word];
      if (any)
        rows[wanted++] = i;
      else
        std::fill_n(head_.out + static_cast<size_t>(i) * spec_.vocab + begin * LANES, tokens,
                    -INFINITY);
    }
    if (!wanted) continue;
    kernels_.gemm(*spec_.head, begin, end, head_input_, rows, wanted, product, width);
    for (int j = 0; j < wanted; j++)
      std::memcpy(head_.out + static_cast<size_t>(rows[j]) * spec_.vocab + begin * LANES,
                  product + j * width, static_cast<size_t>(tokens) * sizeof(float));
  }
}

}  // namespace phloem
