// Vectors of 256 bits: loads of eight float32 that convert, stores that round to nearest, ties to even, and repeated bytes.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace polycast_cpu {

#if defined(__x86_64__)

[[gnu::target("avx2,f16c")]] inline __m256 load8(const float* from) {
  return _mm256_loadu_ps(from);
}

[[gnu::target("avx2,f16c")]] inline __m256 load8(const at::BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

[[gnu::target("avx2,f16c")]] inline __m256 load8(const at::Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Load fewer than eight elements, and zeros.
template <typename T>
[[gnu::target("avx2,f16c")]] __m256 load_first8(const T* from, int64_t count) {
  T elements[8] = {};
  std::memcpy(static_cast<void*>(elements), from, count * sizeof(T));
  return load8(elements);
}

[[gnu::target("avx2,f16c")]] inline void store8(float* to, __m256 values) {
  _mm256_storeu_ps(to, values);
}

[[gnu::target("avx2,f16c")]] inline void store8(at::Half* to, __m256 values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

[[gnu::target("avx2,f16c")]] inline void store8(at::BFloat16* to, __m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

// Repeat four bytes. They are read as a whole, from memory: eight would be split in general registers, which is slow.
[[gnu::target("avx2")]] inline __m256i repeat_four(const void* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm256_set1_epi32(four);
}

[[gnu::target("avx2,f16c")]] inline float sum8(__m256 values) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#endif

}  // namespace polycast_cpu
