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
#ifdef PHLOEM_HAS_AVXVNNI
struct Features {  // of CPUID's leaf 7; not every compiler knows their names
  uint32_t eax, edx;
  explicit Features(uint32_t subleaf) {
    uint32_t ebx, ecx;
    asm volatile("cpuid" : "=a"(eax), "=b"(ebx), "=c"(ecx), "=d"(edx) : "a"(7), "c"(subleaf));
  }
};
// Subleaf 1, EAX bit 4.
bool has_avxvnni() {
  return has_avx2() && Features(0).eax >= 1 && (Features(1).eax >> 4 & 1);
}
#endif
#ifdef PHLOEM_HAS_AMX
// Tiles, int8 and bfloat16 (subleaf 0, EDX bits 24, 25, 22), bfloat16 in vectors (subleaf 1, EAX
// bit 5), and the system's leave to use tiles: it keeps 8 KiB more of a thread that does
// (arch_prctl(2), ARCH_REQ_XCOMP_PERM, feature 18).
bool has_amx() {
  constexpr uint32_t TILES = 1u << 24 | 1u << 25 | 1u << 22;
  return has_avx512() && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512vbmi") && (Features(0).edx & TILES) == TILES &&
         (Features(1).eax >> 5 & 1) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif
#endif

const Candidate* candidates(size_t& count) {
  static const Candidate all[] = {
#ifdef PHLOEM_HAS_AMX
      {&amx_kernels, has_amx()},
#endif
#if defined(__x86_64__)
      {&avx512vnni_kernels, has_avx512() && __builtin_cpu_supports("avx512vnni")},
      {&avx512_kernels, has_avx512()},
#ifdef PHLOEM_HAS_AVXVNNI
      {&avxvnni_kernels, has_avxvnni()},
#endif
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
