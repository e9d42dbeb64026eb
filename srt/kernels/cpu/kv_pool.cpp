#include "kv_pool.h"

#include <cstring>
#include <new>

#include "arena.h"

namespace phloem {

KvPool::KvPool(int kv_heads, int dim, KvType type, int layers, int slots) {
  const size_t element = type == KvType::F32 ? 4 : type == KvType::S8 ? 1 : 2;
  const size_t heads = static_cast<size_t>(kv_heads), slot_bytes = heads * dim * element;
  const size_t arrays = 2 * static_cast<size_t>(layers);
  const size_t runs = (static_cast<size_t>(slots) + KV_RUN - 1) / KV_RUN;
  const size_t run_bytes = arrays * KV_RUN * slot_bytes, run_scales = arrays * KV_RUN * heads;
  const bool scaled = type == KvType::S8;
  data_ = arena_allocate(runs * run_bytes);
  if (scaled && data_) scales_ = arena_allocate(runs * run_scales * sizeof(float));
  if (!data_ || (scaled && !scales_)) {
    if (data_) arena_release(data_);
    throw std::bad_alloc();
  }
  const auto array = [&](size_t i) {
    auto* scales = reinterpret_cast<float*>(scales_);
    return KvArray{type,       data_ + i * KV_RUN * slot_bytes, scaled ? scales + i * KV_RUN * heads : nullptr,
                   kv_heads,   dim,
                   slot_bytes, run_bytes,                       run_scales};
  };
  for (size_t i = 0; i < arrays; i += 2) layers_.push_back({array(i), array(i + 1)});
}

KvPool::~KvPool() {
  arena_release(data_);
  if (scales_) arena_release(scales_);
}

size_t KvPool::slot_bytes() const {
  const KvArray& kv = layers_[0].keys;
  return 2 * layers_.size() * (kv.slot_bytes + (kv.scales ? kv.heads * sizeof(float) : 0));
}

// visit(memory of one slot, its bytes), in the order of `read`.
template <class Visit>
void KvPool::each_piece(const int32_t* slots, int count, Visit&& visit) const {
  for (const KvLayer& layer : layers_)
    for (const KvArray* kv : {&layer.keys, &layer.values}) {
      for (int i = 0; i < count; i++) visit(kv->slot(slots[i]), kv->slot_bytes);
      for (int i = 0; kv->scales && i < count; i++)
        visit(reinterpret_cast<uint8_t*>(kv->slot_scales(slots[i])), kv->heads * sizeof(float));
    }
}

void KvPool::read(const int32_t* slots, int count, uint8_t* out) const {
  each_piece(slots, count, [&](const uint8_t* memory, size_t bytes) {
    std::memcpy(out, memory, bytes);
    out += bytes;
  });
}

void KvPool::write(const int32_t* slots, int count, const uint8_t* data) {
  each_piece(slots, count, [&](uint8_t* memory, size_t bytes) {
    std::memcpy(memory, data, bytes);
    data += bytes;
  });
}

}  // namespace phloem
