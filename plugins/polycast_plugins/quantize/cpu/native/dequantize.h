// Dequantization of integer sums into the output, in one pass: scales, bias and dtype.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "isa.h"
#include "layout.h"
#include "quantize.h"
#include "vectors_avx2.h"

namespace polycast_cpu {

template <typename T>
void dequantize_row_plain(const int32_t* sums, const int32_t* offsets, const float* scales, float scale,
                          const float* bias, int64_t columns, T* out) {
  for (int64_t n = 0; n < columns; ++n) {
    const float value = static_cast<float>(sums[n] - offsets[n]) * scales[n] * scale;
    out[n] = static_cast<T>(bias == nullptr ? value : value + bias[n]);
  }
}

#if defined(__x86_64__)

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline void store16(float* to, __mmask16 mask, __m512 values) {
  _mm512_mask_storeu_ps(to, mask, values);
}

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline void store16(at::Half* to, __mmask16 mask, __m512 values) {
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Return float32 bits whose upper half is the bfloat16: to nearest, ties to even; every nan becomes the canonical one.
[[gnu::target("avx512f,avx512bw,avx512vl")]] inline __m512i rounded_to_bfloat16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline void store16(at::BFloat16* to, __mmask16 mask, __m512 values) {
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bfloat16(values), 16)));
}

template <typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void store32(T* to, __m512 low, __m512 high) {
  store16(to, 0xffff, low);
  store16(to + 16, 0xffff, high);
}

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline void store32(at::BFloat16* to, __m512 low, __m512 high) {
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                       23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(rounded_to_bfloat16(low), odd, rounded_to_bfloat16(high)));
}

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline __m512 scaled16(__m512i sums, __m512i offsets, __m512 scales,
                                                                    __m512 scale) {
  return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, offsets)), scales), scale);
}

template <typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void dequantize_row_avx512(const int32_t* sums, const int32_t* offsets,
                                                                        const float* scales, float scale,
                                                                        const float* bias, int64_t columns, T* out) {
  const __m512 of_row = _mm512_set1_ps(scale);
  if (columns == kBlock) {
    __m512 values[4];
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      values[part] = scaled16(_mm512_loadu_si512(sums + 16 * part), _mm512_loadu_si512(offsets + 16 * part),
                              _mm512_loadu_ps(scales + 16 * part), of_row);
      if (bias != nullptr) {
        values[part] = _mm512_add_ps(values[part], _mm512_loadu_ps(bias + 16 * part));
      }
    }
    store32(out, values[0], values[1]);
    store32(out + 32, values[2], values[3]);
    return;
  }
  for (int64_t n = 0; n < columns; n += 16) {
    const __mmask16 mask = first16(columns - n);
    __m512 value = scaled16(_mm512_loadu_si512(sums + n), _mm512_maskz_loadu_epi32(mask, offsets + n),
                            _mm512_maskz_loadu_ps(mask, scales + n), of_row);
    if (bias != nullptr) {
      value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, bias + n));
    }
    store16(out + n, mask, value);
  }
}

template <typename T>
[[gnu::target("avx2,f16c")]] void dequantize_row_avx2(const int32_t* sums, const int32_t* offsets, const float* scales,
                                                      float scale, const float* bias, int64_t columns, T* out) {
  const __m256 of_row = _mm256_set1_ps(scale);
  int64_t n = 0;
  for (; n + 8 <= columns; n += 8) {
    const __m256i sum = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + n));
    const __m256i offset = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offsets + n));
    const __m256 product = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, offset));
    const __m256 value = _mm256_mul_ps(_mm256_mul_ps(product, load8(scales + n)), of_row);
    store8(out + n, bias == nullptr ? value : _mm256_add_ps(value, load8(bias + n)));
  }
  dequantize_row_plain(sums + n, offsets + n, scales + n, scale, bias == nullptr ? nullptr : bias + n, columns - n,
                       out + n);
}

#endif

// Write (sums - offsets) * scales * scale + bias, rounded to T. `offsets` and `scales` are of the weight's columns, `scale` is of the
// row of activations, and `bias` may be nullptr.
template <typename T>
void dequantize_row(Isa isa, const int32_t* sums, const int32_t* offsets, const float* scales, float scale,
                    const float* bias, int64_t columns, T* out) {
#if defined(__x86_64__)
  if (has_avx512(isa)) {
    return dequantize_row_avx512(sums, offsets, scales, scale, bias, columns, out);
  }
  if (has_avx2(isa)) {
    return dequantize_row_avx2(sums, offsets, scales, scale, bias, columns, out);
  }
#endif
  dequantize_row_plain(sums, offsets, scales, scale, bias, columns, out);
}

}  // namespace polycast_cpu
