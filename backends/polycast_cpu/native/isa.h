// The instruction sets that the kernels are compiled for. A function names its instructions as its target; callers check that the
// processor supports them.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace polycast_cpu {

enum class Isa : int64_t { plain = 0, vnni = 1, amx = 2 };

#if defined(__x86_64__)

// Request AMX tiles from Linux, for all threads of the process.
inline bool may_use_tiles() {
#if defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned tile = 1u << 24, int8 = 1u << 25;
  constexpr long ask_for_feature = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tile) && (d & int8) &&
         syscall(SYS_arch_prctl, ask_for_feature, tile_data) == 0;
#else
  return false;
#endif
}

inline Isa find_best_isa() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni")) {
    return Isa::plain;
  }
  return may_use_tiles() ? Isa::amx : Isa::vnni;
}

#else

inline Isa find_best_isa() {
  return Isa::plain;
}

#endif

// Ask the processor once: CPUID takes microseconds in a virtual machine.
inline Isa best_isa() {
  static const Isa best = find_best_isa();
  return best;
}

// Return whether the processor fetches a stream from memory by itself faster than it is told to. Intel's stop at each page.
inline bool follows_streams() {
#if defined(__x86_64__)
  static const bool is_amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return is_amd;
#else
  return false;
#endif
}

}  // namespace polycast_cpu
