#include "arena.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
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
  uint8_t* mapping;  // as the system gave it
  size_t mapped;
  uint8_t* base;  // the first huge page in it
  size_t size, used;
  int pieces;
};

std::mutex mutex;
std::list<Slab> slabs;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

bool add_slab(size_t bytes) {
  Slab slab{};
  slab.size = rounded(std::max(bytes, SLAB), HUGE_PAGE);
  slab.mapped = slab.size + HUGE_PAGE;
#if defined(__linux__)
  void* p = mmap(nullptr, slab.mapped, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return false;
#else
  void* p = std::calloc(slab.mapped, 1);
  if (!p) return false;
#endif
  slab.mapping = static_cast<uint8_t*>(p);
  const size_t past = reinterpret_cast<uintptr_t>(p) % HUGE_PAGE;
  slab.base = slab.mapping + (past ? HUGE_PAGE - past : 0);
#if defined(__linux__)
  madvise(slab.base, slab.size, MADV_HUGEPAGE);
#endif
  slabs.push_front(slab);
  return true;
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
#if defined(__linux__)
    munmap(slab->mapping, slab->mapped);
#else
    std::free(slab->mapping);
#endif
    slabs.erase(slab);
    return;
  }
}

#if defined(__linux__)
void* pages_allocate(size_t bytes) {
  const size_t size = rounded(bytes, HUGE_PAGE), mapped = size + HUGE_PAGE;
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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
void* pages_allocate(size_t bytes) {
  void* pages = ::operator new(bytes, std::align_val_t{64}, std::nothrow);
  if (pages) std::memset(pages, 0, bytes);
  return pages;
}
void pages_release(void* pages, size_t) { ::operator delete(pages, std::align_val_t{64}); }
#endif

}  // namespace phloem
