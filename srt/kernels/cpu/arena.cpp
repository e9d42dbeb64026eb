#include "arena.h"

#include <algorithm>
#include <cstdlib>
#include <list>
#include <mutex>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace phloem {
namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr size_t SLAB = size_t{32} << 20;

struct Slab {
  uint8_t* base;
  size_t size, used;
  int pieces;
};

std::mutex mutex;
std::list<Slab> slabs;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

bool add_slab(size_t bytes) {
  const size_t size = rounded(std::max(bytes, SLAB), HUGE_PAGE);
  auto* base = static_cast<uint8_t*>(pages_allocate(size));
  if (base) slabs.push_front({base, size, 0, 0});
  return base;
}

}  // namespace

uint8_t* arena_allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  bytes = rounded(std::max<size_t>(bytes, 1), 64);
  if (slabs.empty() || slabs.front().size - slabs.front().used < bytes)
    if (!add_slab(bytes)) return nullptr;
  Slab& slab = slabs.front();
  uint8_t* piece = slab.base + slab.used;
  slab.used += bytes;
  slab.pieces++;
  return piece;
}

void arena_release(uint8_t* piece) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto slab = slabs.begin(); slab != slabs.end(); ++slab) {
    if (piece < slab->base || piece >= slab->base + slab->size) continue;
    if (--slab->pieces) return;
    pages_release(slab->base, slab->size);
    slabs.erase(slab);
    return;
  }
}

#if defined(__linux__)
void* pages_allocate(size_t bytes) {
  const size_t size = rounded(bytes, HUGE_PAGE), mapped = size + HUGE_PAGE;
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  auto* mapping = static_cast<uint8_t*>(p);
  const size_t before = (HUGE_PAGE - reinterpret_cast<uintptr_t>(p) % HUGE_PAGE) % HUGE_PAGE;
  if (before) munmap(mapping, before);
  munmap(mapping + before + size, HUGE_PAGE - before);
  madvise(mapping + before, size, MADV_HUGEPAGE);
  return mapping + before;
}
void pages_release(void* pages, size_t bytes) { munmap(pages, rounded(bytes, HUGE_PAGE)); }
#else
// calloc, whose zeros take no memory until they are written, and its pointer before the pages.
void* pages_allocate(size_t bytes) {
  void* p = std::calloc(bytes + HUGE_PAGE + sizeof p, 1);
  if (!p) return nullptr;
  const auto first = reinterpret_cast<uintptr_t>(p) + sizeof p;
  auto* pages = reinterpret_cast<void**>(rounded(first, HUGE_PAGE));
  pages[-1] = p;
  return pages;
}
void pages_release(void* pages, size_t) { std::free(static_cast<void**>(pages)[-1]); }
#endif

}  // namespace phloem
