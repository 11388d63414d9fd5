// From floating point to bytes: rows of activations, and rows of weights.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "isa.h"
#include "layout.h"

namespace polycast_cpu {

// As bits, since their order is that of the magnitudes: inf is above all numbers, and nan above inf.
template <typename T>
uint32_t largest_magnitude_plain(const T* row, int64_t terms) {
  uint32_t largest = 0;
  for (int64_t k = 0; k < terms; ++k) {
    largest = std::max(largest, std::bit_cast<uint32_t>(static_cast<float>(row[k])) & 0x7fffffffu);
  }
  return largest;
}

template <typename T>
void quantize_row_plain(const T* row, int64_t terms, float inverse, uint8_t* out) {
  for (int64_t k = 0; k < terms; ++k) {
    out[k] = static_cast<uint8_t>(static_cast<int>(std::nearbyint(static_cast<float>(row[k]) * inverse)) + kZeroPoint);
  }
}

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

template <typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] uint32_t largest_magnitude_avx512(const T* row, int64_t terms) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest[4] = {};
  int64_t k = 0;
  for (; k + 64 <= terms; k += 64) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __m512i bits = _mm512_castps_si512(load16(row + k + 16 * part, 0xffff));
      largest[part] = _mm512_max_epu32(largest[part], _mm512_and_si512(bits, magnitude));
    }
  }
  for (; k < terms; k += 16) {
    const __m512i bits = _mm512_castps_si512(load16(row + k, first16(terms - k)));
    largest[0] = _mm512_max_epu32(largest[0], _mm512_and_si512(bits, magnitude));
  }
  return _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_max_epu32(largest[0], largest[1]), _mm512_max_epu32(largest[2], largest[3])));
}

template <typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void quantize_row_avx512(const T* row, int64_t terms, float inverse,
                                                                      uint8_t* out) {
  const __m512 factor = _mm512_set1_ps(inverse);
  const __m128i zero_point = _mm_set1_epi8(static_cast<char>(kZeroPoint));
  for (int64_t k = 0; k < terms; k += 16) {
    const __mmask16 mask = first16(terms - k);
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load16(row + k, mask), factor));
    _mm_mask_storeu_epi8(out + k, mask, _mm_xor_si128(_mm512_cvtepi32_epi8(rounded), zero_point));
  }
}

#endif

template <typename T>
uint32_t largest_magnitude(Isa isa, const T* row, int64_t terms) {
#if defined(__x86_64__)
  if (isa != Isa::plain) {
    return largest_magnitude_avx512(row, terms);
  }
#endif
  return largest_magnitude_plain(row, terms);
}

template <typename T>
void quantize_row(Isa isa, const T* row, int64_t terms, float inverse, uint8_t* out) {
#if defined(__x86_64__)
  if (isa != Isa::plain) {
    return quantize_row_avx512(row, terms, inverse, out);
  }
#endif
  quantize_row_plain(row, terms, inverse, out);
}

// What one step is worth in a row whose largest magnitude is given by its bits.
inline float scale_of(uint32_t magnitude) {
  return std::max(std::bit_cast<float>(magnitude), kSmallest) / kLevels;
}

inline bool is_finite(uint32_t magnitude) {
  return magnitude < 0x7f800000u;
}

}  // namespace polycast_cpu
