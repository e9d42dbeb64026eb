// A decoder of the Llama family: one call computes a step of any mixture of rows.
//
//   x = embed(token)
//   each layer:  x += o(attend(rope(qkv(norm(x)))))          Qwen3: norm q and k before rope
//                x += down(silu(gate(norm(x))) · up(norm(x)))
//   hidden = norm(x)
//
// The structs are laid out as the Python side fills them in.
#pragma once
#include <cstdint>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "kernels.h"
#include "matrix.h"
#include "team.h"

namespace phloem {

constexpr int ROWS = 64;  // rows that pass through a task together
constexpr int WIDE = 4;   // blocks of a task

extern "C" {

struct LayerSpec {
  const Matrix *q, *k, *v, *o, *gate, *up, *down;  // rows of q, k, v: heads · padded_dim
  const float *attention_norm, *mlp_norm;          // [hidden]
  const float *q_norm, *k_norm;                    // [head_dim] or null
  const float *q_bias, *k_bias, *v_bias;           // [heads · padded_dim] or null
  const float* o_bias;                             // [hidden] or null
};

struct DecoderSpec {
  int32_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, context;
  int32_t slots, kv_type, window;
  float eps, soft_cap;
  const float *cos, *sin;  // [context][head_dim / 2]
  const Matrix *embedding, *head;
  const float* norm;
  const LayerSpec* layer;
};

}  // extern "C"

class Decoder {
 public:
  Decoder(const DecoderSpec& spec, const Kernels& kernels, Team& team);
  ~Decoder() { team_.settle(); }

  // Computes `count` tokens at `positions`, of all rows one after another; writes their KV, and
  // their hidden states after the last norm to hidden [count][hidden].
  void step(int count, const int32_t* tokens, const int32_t* positions,
            const std::vector<SequenceRow>& rows, float* hidden);

  // hidden [count][hidden] → out [count][vocab]. Where masks[i] is not null, tokens without a bit
  // in it may be left at -infinity.
  void logits(int count, const float* hidden, const int32_t* const* masks, float* out);

  // Slots may be read and written while other threads compute with others.
  KvPool& kv() { return kv_; }
  const KvPool& kv() const { return kv_; }

  const DecoderSpec& spec() const { return spec_; }

 private:
  struct Own {  // what a member prepares for itself when there are few rows
    Activations normed, attended, gated;
  };
  static std::vector<SequenceRow> part_of(const std::vector<SequenceRow>& rows, int from, int count);
  void compute_part(int count, const int32_t* tokens, const int32_t* positions,
                    const std::vector<SequenceRow>& rows, float* hidden);
  void reserve(int count);
  struct RowRange {
    int begin, end;
  };
  void compute(Member& me);
  void compute_by_columns(Member& me);
  void compute_by_rows(Member& me);
  void begin_layer(Member& me, const LayerSpec& layer, const KvLayer& kv, RowRange rows);
  void finish_layer(Member& me, const LayerSpec& layer, RowRange rows);
  void compute_logits(Member& me);
  void some_logits(Member& me, int begin, int end);
  void embed(Member& me);
  template <class Prepare>
  const Activations& prepared(Member& me, Activations Own::* own, Activations& shared, int tasks,
                              Prepare&& prepare);
  const Activations& normalised(Member& me, const float* weight, bool integer, int tasks);
  const Activations& quantized(Member& me, Activations Own::* own, Activations& shared,
                               const Matrix& w);
  void normalise(int i, const float* weight, bool integer, Activations& out);
  void head(Member& me, const LayerSpec& layer, const Activations& input, const KvLayer& kv,
            int index, RowRange some);
  void add_product(Member& me, const Matrix& w, const Activations& x, const float* bias);
  void add_product(Member& me, const Matrix& w, const Activations& x, const float* bias, int task,
                   RowRange some);
  void gate_and_up(Member& me, const LayerSpec& layer, const Activations& x, int task,
                   RowRange some);
  float* temporary(const Member& me) { return temporary_.data() + me.id() * temporary_stride_; }

  const DecoderSpec spec_;
  const std::vector<LayerSpec> layers_;
  const AttentionShape shape_;
  const Kernels& kernels_;
  Team& team_;
  KvPool kv_;
  Attention attention_;

  int count_ = 0;  // of the step
  int group_ = 0;  // rows that a member takes through a layer, or 0: members share out columns
  const int32_t *tokens_ = nullptr, *positions_ = nullptr;
  float* hidden_ = nullptr;
  struct {
    int count;
    const float* hidden;
    const int32_t* const* masks;
    float* out;
  } head_{};
  std::vector<int> slot_;  // of each token
  int capacity_ = 0;
  Activations x_, normed_, attended_, gated_, head_input_;
  std::vector<Own> own_;
  StepVector<float> q_;
  size_t temporary_stride_;
  StepVector<float> temporary_;
  std::vector<int> identity_;
  const std::function<void(Member&)> step_job_, head_job_;
};

}  // namespace phloem
