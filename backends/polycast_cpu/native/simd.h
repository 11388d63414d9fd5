// Vectors of float32 for the kernels of the fast dtypes: loads that convert, and stores that round to nearest, ties to even.
#pragma once

#include <ATen/Version.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "finish.h"
#include "quantize.h"

namespace polycast_cpu {

enum class Simd : int64_t { plain = 0, avx2 = 1, avx512 = 2 };

// Like torch's kernels, heed ATEN_CPU_CAPABILITY.
inline Simd find_best_simd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const std::string torch = at::get_cpu_capability();
  unsigned a, b, c = 0, d;
  constexpr unsigned f16c = 1u << 29;
  if (torch == "DEFAULT" || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__get_cpuid(1, &a, &b, &c, &d) || !(c & f16c)) {
    return Simd::plain;
  }
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl");
  return torch != "AVX2" && has_avx512 ? Simd::avx512 : Simd::avx2;
#else
  return Simd::plain;
#endif
}

// Asked once for each process.
inline Simd best_simd() {
  static const Simd best = find_best_simd();
  return best;
}

template <typename T>
void finish_plain(const float* sums, float alpha, const float* bias, int64_t count, T* out) {
  for (int64_t n = 0; n < count; ++n) {
    const float value = sums[n] * alpha;
    out[n] = static_cast<T>(bias == nullptr ? value : value + bias[n]);
  }
}

#if defined(__x86_64__)

[[gnu::target("avx2,fma,f16c")]] inline __m256 load8(const float* from) {
  return _mm256_loadu_ps(from);
}

[[gnu::target("avx2,fma,f16c")]] inline __m256 load8(const at::BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

[[gnu::target("avx2,fma,f16c")]] inline __m256 load8(const at::Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Load fewer than eight elements, and zeros.
template <typename T>
[[gnu::target("avx2,fma,f16c")]] __m256 load_first8(const T* from, int64_t count) {
  T elements[8] = {};
  std::memcpy(static_cast<void*>(elements), from, count * sizeof(T));
  return load8(elements);
}

[[gnu::target("avx2,fma,f16c")]] inline void store8(float* to, __m256 values) {
  _mm256_storeu_ps(to, values);
}

[[gnu::target("avx2,fma,f16c")]] inline void store8(at::Half* to, __m256 values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

[[gnu::target("avx2,fma,f16c")]] inline void store8(at::BFloat16* to, __m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

[[gnu::target("avx2,fma,f16c")]] inline float sum8(__m256 values) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <typename T>
[[gnu::target("avx2,fma,f16c")]] void finish_avx2(const float* sums, float alpha, const float* bias, int64_t count,
                                                  T* out) {
  const __m256 factor = _mm256_set1_ps(alpha);
  for (int64_t n = 0; n < count; n += 8) {
    const int64_t left = count - n;
    const bool whole = left >= 8;
    __m256 value = _mm256_mul_ps(whole ? load8(sums + n) : load_first8(sums + n, left), factor);
    if (bias != nullptr) {
      value = _mm256_add_ps(value, whole ? load8(bias + n) : load_first8(bias + n, left));
    }
    if (whole) {
      store8(out + n, value);
    } else {
      T elements[8];
      store8(elements, value);
      std::memcpy(static_cast<void*>(out + n), elements, left * sizeof(T));
    }
  }
}

template <typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void finish_avx512(const float* sums, float alpha, const float* bias,
                                                                int64_t count, T* out) {
  const __m512 factor = _mm512_set1_ps(alpha);
  for (int64_t n = 0; n < count; n += 16) {
    const __mmask16 mask = first16(count - n);
    __m512 value = _mm512_mul_ps(load16(sums + n, mask), factor);
    if (bias != nullptr) {
      value = _mm512_add_ps(value, load16(bias + n, mask));
    }
    store16(out + n, mask, value);
  }
}

#endif

// Write alpha * sums + bias.
template <typename T>
void finish(Simd simd, const float* sums, float alpha, const float* bias, int64_t count, T* out) {
#if defined(__x86_64__)
  if (simd == Simd::avx512) {
    return finish_avx512(sums, alpha, bias, count, out);
  }
  if (simd == Simd::avx2) {
    return finish_avx2(sums, alpha, bias, count, out);
  }
#endif
  finish_plain(sums, alpha, bias, count, out);
}

}  // namespace polycast_cpu
