// Vectors of float32 for the kernels of the fast dtypes: loads that convert, and stores that round to nearest, ties to even.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#include "dequantize.h"
#include "quantize.h"
#include "vectors_avx2.h"

namespace polycast_cpu {

enum class Simd : int64_t { plain = 0, avx2 = 1, avx512 = 2 };

// Like torch's kernels, respect ATEN_CPU_CAPABILITY.
inline Simd find_best_simd() {
#if defined(__x86_64__)
  const int64_t bits = vector_bits();
  return bits >= 512 && supports_avx512() ? Simd::avx512 : bits >= 256 && supports_avx2() ? Simd::avx2 : Simd::plain;
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
void apply_epilogue_plain(const float* sums, float alpha, const float* bias, int64_t count, T* out) {
  for (int64_t n = 0; n < count; ++n) {
    const float value = sums[n] * alpha;
    out[n] = static_cast<T>(bias == nullptr ? value : value + bias[n]);
  }
}

#if defined(__x86_64__)

template <typename T>
[[gnu::target("avx2,fma,f16c")]] void apply_epilogue_avx2(const float* sums, float alpha, const float* bias,
                                                          int64_t count, T* out) {
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
[[gnu::target("avx512f,avx512bw,avx512vl")]] void apply_epilogue_avx512(const float* sums, float alpha, const float* bias,
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

// Write alpha * sums + bias, rounded to T. `bias` may be nullptr.
template <typename T>
void apply_epilogue(Simd simd, const float* sums, float alpha, const float* bias, int64_t count, T* out) {
#if defined(__x86_64__)
  if (simd == Simd::avx512) {
    return apply_epilogue_avx512(sums, alpha, bias, count, out);
  }
  if (simd == Simd::avx2) {
    return apply_epilogue_avx2(sums, alpha, bias, count, out);
  }
#endif
  apply_epilogue_plain(sums, alpha, bias, count, out);
}

}  // namespace polycast_cpu
