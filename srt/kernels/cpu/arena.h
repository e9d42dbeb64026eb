// Memory for weights and KV: zeros, side by side, on huge pages that exist once they are written.
//
// A model has hundreds of matrices, most of them smaller than a huge page. Each in a mapping of its
// own would lie on small pages, and a token reads all of them once: the look-ups of their addresses
// would cost as much as the reading. The slots of a sequence may lie anywhere, so KV needs it too.
#pragma once
#include <cstddef>
#include <cstdint>

namespace phloem {

// 64-byte aligned; null if there is no memory.
uint8_t* arena_allocate(size_t bytes);
// Gives back what `arena_allocate` gave. A slab returns to the system with its last piece.
void arena_release(uint8_t* piece);

}  // namespace phloem
