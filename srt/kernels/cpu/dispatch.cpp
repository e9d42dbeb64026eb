// Which kernels this CPU can run.
#include <cstring>
#include <string>

#include "kernels.h"

#ifdef PHLOEM_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

#ifdef PHLOEM_HAS_AMX
// Tiles, int8 and bfloat16 (leaf 7, EDX bits 24, 25, 22), and the system's leave to use them: it
// keeps 8 KiB more of a thread that does (arch_prctl(2), ARCH_REQ_XCOMP_PERM, feature 18).
bool has_amx() {
  uint32_t a, b, c, d;
  asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  constexpr uint32_t NEEDED = 1u << 24 | 1u << 25 | 1u << 22;
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && (d & NEEDED) == NEEDED &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif

const Candidate* candidates(size_t& count) {
  static const Candidate all[] = {
#ifdef PHLOEM_HAS_AMX
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
