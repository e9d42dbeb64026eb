// Which kernels this CPU can run.
#include <cstring>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace phloem {
namespace {

struct Candidate {
  const Kernels* kernels;
  bool runs;
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
// Leaf 7, subleaf 1, EAX bit 4; not every compiler knows its name.
bool has_avxvnni() {
  uint32_t a, b, c, d;
  asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  if (a < 1) return false;
  asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(1));
  return has_avx2() && (a >> 4 & 1);
}
#endif

#if defined(__x86_64__) && defined(__linux__)
// AMX is there (leaf 7, EDX bits 24 and 25), and the kernel lets this process use tile data.
bool has_amx() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  uint32_t a, b, c, d;
  asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  if (!(d >> 24 & 1) || !(d >> 25 & 1)) return false;
  if (!has_avx512() || !__builtin_cpu_supports("avx512vnni")) return false;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#endif

const Candidate* candidates(size_t& count) {
  static const Candidate all[] = {
#if defined(__x86_64__) && defined(__linux__)
      {&amx_kernels, has_amx()},
#endif
#if defined(__x86_64__)
      {&avx512vnni_kernels, has_avx512() && __builtin_cpu_supports("avx512vnni")},
      {&avx512_kernels, has_avx512()},
      {&avxvnni_kernels, has_avxvnni()},
      {&avx2_kernels, has_avx2()},
#endif
      {&generic_kernels, true},
  };
  count = sizeof all / sizeof all[0];
  return all;
}

}  // namespace

uint8_t* thread_buffer(size_t bytes) {
  thread_local std::vector<uint8_t> memory;
  if (memory.size() < bytes + 64) memory.resize(bytes + 64);
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - at % 64) % 64;
}

const Kernels* find_kernels(const char* name) {
  size_t count;
  const Candidate* all = candidates(count);
  for (size_t i = 0; i < count; i++) {
    if (!all[i].runs) continue;
    if (!name || !*name || std::strcmp(name, all[i].kernels->name) == 0) return all[i].kernels;
  }
  return nullptr;
}

const char* runnable_kernels() {
  static const std::string names = [] {
    std::string joined;
    size_t count;
    const Candidate* all = candidates(count);
    for (size_t i = 0; i < count; i++) {
      if (!all[i].runs) continue;
      if (!joined.empty()) joined += ' ';
      joined += all[i].kernels->name;
    }
    return joined;
  }();
  return names.c_str();
}

}  // namespace phloem
