// Memory for weights and KV: zeros, side by side, on huge pages that exist once they are written.
//
// A model has hundreds of matrices, most of them smaller than a huge page. Each in a mapping of its
// own would lie on small pages, and a token reads all of them once: the look-ups of their addresses
// would cost as much as the reading. The slots of a sequence may lie anywhere, so KV needs it too.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace phloem {

// 64-byte aligned; null if there is no memory.
uint8_t* arena_allocate(size_t bytes);
// Gives back what `arena_allocate` gave. A slab returns to the system with its last piece.
void arena_release(uint8_t* piece);

// The same in a mapping of its own, from the start of a huge page on: a slab, or an array that a step
// works on.
void* pages_allocate(size_t bytes);
void pages_release(void* pages, size_t bytes);

// An allocator for what a step works on.
template <class T>
struct StepAllocator {
  using value_type = T;
  StepAllocator() = default;
  template <class U>
  StepAllocator(const StepAllocator<U>&) {}
  static constexpr size_t LARGE = size_t{1} << 20;
  static constexpr auto ALIGNED = std::align_val_t{64};
  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    void* memory = bytes < LARGE ? ::operator new(bytes, ALIGNED) : pages_allocate(bytes);
    if (!memory) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes < LARGE)
      ::operator delete(memory, ALIGNED);
    else
      pages_release(memory, bytes);
  }
  bool operator==(const StepAllocator&) const { return true; }
  bool operator!=(const StepAllocator&) const { return false; }
};
// 64-byte aligned.
template <class T>
using StepVector = std::vector<T, StepAllocator<T>>;

}  // namespace phloem
