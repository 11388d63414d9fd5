// Quantization of rows by AVX2. What is left of a row is quantized in plain C++, to the same bits.
#pragma once

#include <bit>

#include "quantize_plain.h"
#include "vectors_avx2.h"

namespace polycast_cpu {

#if defined(__x86_64__)

[[gnu::target("avx2,f16c")]] inline uint32_t largest_magnitude_avx2(const float* row, int64_t terms) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  int64_t k = 0;
  for (; k + 8 <= terms; k += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k));
    largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, magnitude));
  }
  alignas(32) uint32_t found[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(found), largest);
  return std::max(*std::max_element(found, found + 8), largest_magnitude_plain(row + k, terms - k));
}

// For bfloat16 and float16, compared as bits too.
template <typename T>
[[gnu::target("avx2,f16c")]] uint32_t largest_magnitude_avx2(const T* row, int64_t terms) {
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  __m256i largest = _mm256_setzero_si256();
  int64_t k = 0;
  for (; k + 16 <= terms; k += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k));
    largest = _mm256_max_epu16(largest, _mm256_and_si256(bits, magnitude));
  }
  alignas(32) uint16_t found[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(found), largest);
  const T value(*std::max_element(found, found + 16), T::from_bits());
  return std::max(std::bit_cast<uint32_t>(static_cast<float>(value)), largest_magnitude_plain(row + k, terms - k));
}

template <typename T>
[[gnu::target("avx2,f16c")]] __m256i level8(const T* from, __m256 inverse) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(load8(from), inverse));
}

template <typename T>
[[gnu::target("avx2,f16c")]] void quantize_row_avx2(const T* row, int64_t terms, float inverse, uint8_t* out) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i zero_point = _mm256_set1_epi8(static_cast<char>(kZeroPoint));
  // Packing works within 128-bit lanes: this restores the order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  int64_t k = 0;
  for (; k + 32 <= terms; k += 32) {
    const __m256i low = _mm256_packs_epi32(level8(row + k, factor), level8(row + k + 8, factor));
    const __m256i high = _mm256_packs_epi32(level8(row + k + 16, factor), level8(row + k + 24, factor));
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), _mm256_xor_si256(bytes, zero_point));
  }
  quantize_row_plain(row + k, terms - k, inverse, out + k);
}

#endif

}  // namespace polycast_cpu
