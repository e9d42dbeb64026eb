// Keys and values of all layers, one slot a token. Slot 0 is padding and stays zero.
//
// All that a run of slots has in any layer lies together, run after run: so a pool that is hardly used
// takes little more memory than what it keeps, though it lies on huge pages.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace phloem {

struct KvLayer {
  KvArray keys, values;
};

class KvPool {
 public:
  // `dim` is padded. Throws std::bad_alloc.
  KvPool(int kv_heads, int dim, KvType type, int layers, int slots);
  ~KvPool();
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;
  const KvLayer& operator[](size_t layer) const { return layers_[layer]; }
  // Bytes of a slot's keys and values in all layers as they are kept, scales included.
  size_t slot_bytes() const;
  // Layer after layer the keys, then the values, of `count` slots: [count][data], [count][scales].
  void read(const int32_t* slots, int count, uint8_t* out) const;
  void write(const int32_t* slots, int count, const uint8_t* data);

 private:
  template <class Visit>
  void each_piece(const int32_t* slots, int count, Visit&& visit) const;
  std::vector<KvLayer> layers_;
  uint8_t *data_ = nullptr, *scales_ = nullptr;
};

}  // namespace phloem
