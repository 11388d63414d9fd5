// Quantization of rows to bytes.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "isa.h"
#include "layout.h"
#include "quantize_avx2.h"
#include "quantize_plain.h"

namespace polycast_cpu {

#if defined(__x86_64__)

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline __m512 load16(const float* from, __mmask16 mask) {
  return _mm512_maskz_loadu_ps(mask, from);
}

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline __m512 load16(const at::BFloat16* from, __mmask16 mask) {
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline __m512 load16(const at::Half* from, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from));
}

inline __mmask16 first16(int64_t left) {
  return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
}

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline uint32_t largest_magnitude_avx512(const float* row,
                                                                                      int64_t terms) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest[2] = {};
  int64_t k = 0;
  for (; k + 32 <= terms; k += 32) {
    largest[0] = _mm512_max_epu32(largest[0], _mm512_and_si512(_mm512_loadu_si512(row + k), magnitude));
    largest[1] = _mm512_max_epu32(largest[1], _mm512_and_si512(_mm512_loadu_si512(row + k + 16), magnitude));
  }
  for (; k < terms; k += 16) {
    const __m512i bits = _mm512_maskz_loadu_epi32(first16(terms - k), row + k);
    largest[0] = _mm512_max_epu32(largest[0], _mm512_and_si512(bits, magnitude));
  }
  return _mm512_reduce_max_epu32(_mm512_max_epu32(largest[0], largest[1]));
}

// For bfloat16 and float16, compared as bits too.
template <typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] uint32_t largest_magnitude_avx512(const T* row, int64_t terms) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i largest[2] = {};
  int64_t k = 0;
  for (; k + 64 <= terms; k += 64) {
    largest[0] = _mm512_max_epu16(largest[0], _mm512_and_si512(_mm512_loadu_si512(row + k), magnitude));
    largest[1] = _mm512_max_epu16(largest[1], _mm512_and_si512(_mm512_loadu_si512(row + k + 32), magnitude));
  }
  for (; k < terms; k += 32) {
    const auto mask = terms - k >= 32 ? ~__mmask32{0} : (__mmask32{1} << (terms - k)) - 1;
    const __m512i bits = _mm512_maskz_loadu_epi16(mask, row + k);
    largest[0] = _mm512_max_epu16(largest[0], _mm512_and_si512(bits, magnitude));
  }
  const __m512i both = _mm512_max_epu16(largest[0], largest[1]);
  const __m512i halves = _mm512_max_epu32(_mm512_srli_epi32(both, 16), _mm512_and_si512(both, _mm512_set1_epi32(0xffff)));
  const T found(static_cast<uint16_t>(_mm512_reduce_max_epu32(halves)), T::from_bits());
  return std::bit_cast<uint32_t>(static_cast<float>(found));
}

template <typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] __m512i level16(const T* from, __mmask16 mask, __m512 inverse) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(load16(from, mask), inverse));
}

template <typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void quantize_row_avx512(const T* row, int64_t terms, float inverse,
                                                                      uint8_t* out) {
  const __m512 factor = _mm512_set1_ps(inverse);
  const __m512i zero_point = _mm512_set1_epi8(static_cast<char>(kZeroPoint));
  // Packing works within 128-bit lanes: this restores the order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  int64_t k = 0;
  for (; k + 64 <= terms; k += 64) {
    const __m512i low = _mm512_packs_epi32(level16(row + k, 0xffff, factor), level16(row + k + 16, 0xffff, factor));
    const __m512i high =
        _mm512_packs_epi32(level16(row + k + 32, 0xffff, factor), level16(row + k + 48, 0xffff, factor));
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    _mm512_storeu_si512(out + k, _mm512_xor_si512(bytes, zero_point));
  }
  for (; k < terms; k += 16) {
    const __mmask16 mask = first16(terms - k);
    const __m128i bytes = _mm512_cvtepi32_epi8(level16(row + k, mask, factor));
    _mm_mask_storeu_epi8(out + k, mask, _mm_xor_si128(bytes, _mm512_castsi512_si128(zero_point)));
  }
}

#endif

template <typename T>
uint32_t largest_magnitude(Isa isa, const T* row, int64_t terms) {
#if defined(__x86_64__)
  if (has_avx512(isa)) {
    return largest_magnitude_avx512(row, terms);
  }
  if (has_avx2(isa)) {
    return largest_magnitude_avx2(row, terms);
  }
#endif
  return largest_magnitude_plain(row, terms);
}

template <typename T>
void quantize_row(Isa isa, const T* row, int64_t terms, float inverse, uint8_t* out) {
#if defined(__x86_64__)
  if (has_avx512(isa)) {
    return quantize_row_avx512(row, terms, inverse, out);
  }
  if (has_avx2(isa)) {
    return quantize_row_avx2(row, terms, inverse, out);
  }
#endif
  quantize_row_plain(row, terms, inverse, out);
}

// Return the scale of a row, given the bits of its largest magnitude.
inline float scale_of(uint32_t magnitude) {
  return std::max(std::bit_cast<float>(magnitude), kSmallest) / kLevels;
}

inline bool is_finite(uint32_t magnitude) {
  return magnitude < 0x7f800000u;
}

}  // namespace polycast_cpu
