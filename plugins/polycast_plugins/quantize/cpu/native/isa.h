// The instruction sets that the kernels are compiled for. A function names its instructions as its target; callers check that the
// processor supports them.
#pragma once

#include <ATen/Version.h>

#include <cstdint>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

namespace polycast_cpu {

// Each set has what kernels of integers need: `vnni` is AVX512-VNNI, `avx_vnni` the same with vectors of 256 bits, and `amx` adds
// tiles to it. `dotprod` and `i8mm` are those of Arm's NEON.
enum class Isa : int64_t { plain = 0, avx2 = 1, avx_vnni = 2, vnni = 3, amx = 4, dotprod = 5, i8mm = 6 };

constexpr bool has_avx512(Isa isa) {
  return isa == Isa::vnni || isa == Isa::amx;
}

constexpr bool has_avx2(Isa isa) {
  return isa == Isa::avx2 || isa == Isa::avx_vnni;
}

constexpr bool has_dotprod(Isa isa) {
  return isa == Isa::dotprod || isa == Isa::i8mm;
}

#if defined(__x86_64__)

// Ask Linux to let this process use AMX tiles; return whether the processor has them and Linux agreed.
inline bool request_amx() {
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

// AVX2, FMA and F16C, the conversions of float16.
inline bool supports_avx2() {
  __builtin_cpu_init();
  unsigned a, b, c = 0, d;
  constexpr unsigned f16c = 1u << 29;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & f16c);
}

inline bool supports_avx_vnni() {
  unsigned a = 0, b, c, d;
  constexpr unsigned avx_vnni = 1u << 4;
  return supports_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & avx_vnni);
}

inline bool supports_avx512() {
  return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

// The widest vectors that torch's kernels use, in bits, which ATEN_CPU_CAPABILITY limits.
inline int64_t vector_bits() {
  const std::string torch = at::get_cpu_capability();
  return torch == "DEFAULT" ? 128 : torch == "AVX2" ? 256 : 512;
}

// Return the sets that the processor has, the best last.
inline std::vector<int64_t> find_isas() {
  std::vector<int64_t> found{static_cast<int64_t>(Isa::plain)};
  const auto add = [&](bool supported, Isa isa) {
    if (supported) {
      found.push_back(static_cast<int64_t>(isa));
    }
  };
  const bool has_vnni = supports_avx512() && __builtin_cpu_supports("avx512vnni");
  add(supports_avx2(), Isa::avx2);
  add(supports_avx_vnni(), Isa::avx_vnni);
  add(has_vnni, Isa::vnni);
  add(has_vnni && request_amx(), Isa::amx);
  return found;
}

// Return whether a set's vectors are no wider than those of torch's kernels.
inline bool is_allowed(Isa isa) {
  return vector_bits() >= (isa == Isa::plain ? 0 : has_avx2(isa) ? 256 : 512);
}

#else

#if defined(__aarch64__) && defined(__linux__)

inline bool supports_dotprod() {
  constexpr unsigned long dotprod = 1ul << 20;
  return getauxval(AT_HWCAP) & dotprod;
}

inline bool supports_i8mm() {
  constexpr unsigned long i8mm = 1ul << 13;
  return supports_dotprod() && (getauxval(AT_HWCAP2) & i8mm);
}

#elif defined(__aarch64__) && defined(__APPLE__)

inline bool supports(const char* feature) {
  int found = 0;
  size_t size = sizeof(found);
  return sysctlbyname(feature, &found, &size, nullptr, 0) == 0 && found != 0;
}

inline bool supports_dotprod() {
  return supports("hw.optional.arm.FEAT_DotProd");
}

inline bool supports_i8mm() {
  return supports_dotprod() && supports("hw.optional.arm.FEAT_I8MM");
}

#else

inline bool supports_dotprod() {
  return false;
}

inline bool supports_i8mm() {
  return false;
}

#endif

inline std::vector<int64_t> find_isas() {
  std::vector<int64_t> found{static_cast<int64_t>(Isa::plain)};
  if (supports_dotprod()) {
    found.push_back(static_cast<int64_t>(Isa::dotprod));
  }
  if (supports_i8mm()) {
    found.push_back(static_cast<int64_t>(Isa::i8mm));
  }
  return found;
}

inline bool is_allowed(Isa) {
  return true;
}

#endif

inline Isa find_best_isa() {
  Isa best = Isa::plain;
  for (int64_t isa : find_isas()) {
    best = is_allowed(static_cast<Isa>(isa)) ? static_cast<Isa>(isa) : best;
  }
  return best;
}

// Ask the processor once: CPUID takes microseconds in a virtual machine.
inline Isa best_isa() {
  static const Isa best = find_best_isa();
  return best;
}

// Return whether the processor's prefetcher goes on into the next page, as AMD's does and Intel's does not. It needs no
// prefetch instructions, and what these prefetch should be in the order of memory too.
inline bool prefetcher_crosses_pages() {
#if defined(__x86_64__)
  static const bool is_amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return is_amd;
#else
  return false;
#endif
}

}  // namespace polycast_cpu
