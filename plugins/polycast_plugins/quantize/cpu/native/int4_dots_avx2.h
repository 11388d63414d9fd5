// Integer sums of one chunk of a weight in 4 bits by AVX2. Its products of bytes need no more: they are faster than memory.
#pragma once

#include <algorithm>

#include "int4_dots.h"
#include "vectors_avx2.h"

namespace polycast_cpu {

#if defined(__x86_64__)

// The steps of eight terms whose sums fit 16 bits: the sum of two products is at most 2 * 15 * 127, and a step adds two of them.
constexpr int64_t kSteps16 = 4;

[[gnu::target("avx2")]] inline __m256i load32(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

// `Rows` rows by `Parts` times 8 columns, of which the first is `8 * part`.
template <int Rows, int Parts>
[[gnu::target("avx2")]] void int4_dots_avx2(const Int4Arguments& of, int part, int32_t (*sums)[kBlock]) {
  const __m256i low_half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const uint8_t* at = of.chunk + Int4Weight::kScaleBytes;
  const int8_t* x = of.x;
  for (int64_t first = 0, number = 0; first < of.count; first += of.group, ++number) {
    const uint8_t* const multipliers = at + 8 * part;
    at += Int4Weight::kMultiplierBytes;
    const int64_t eights = Groups::eights(std::min(of.group, of.count - first));
    for (int64_t eight = 0; eight < eights; eight += kSteps16) {
      __m256i pairs[Rows][Parts];
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
        for (int each = 0; each < Parts; ++each) {
          pairs[row][each] = _mm256_setzero_si256();
        }
      }
      for (int64_t step = std::min(kSteps16, eights - eight); step > 0; --step) {
#pragma GCC unroll 8
        for (int each = 0; each < Parts; ++each) {
          const uint8_t* const bytes = at + 32 * (part + each);
          if (Rows == 1 && each % 2 == 0) {
            _mm_prefetch(reinterpret_cast<const char*>(bytes) + kInt4Ahead, _MM_HINT_T0);
          }
          const __m256i both = load32(bytes);
          const __m256i low = _mm256_and_si256(both, low_half);
          const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
#pragma GCC unroll 8
          for (int row = 0; row < Rows; ++row) {
            const int8_t* const eight_terms = x + row * of.x_stride;
            const __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(low, repeat_four(eight_terms)),
                                                      _mm256_maddubs_epi16(high, repeat_four(eight_terms + 4)));
            pairs[row][each] = _mm256_add_epi16(pairs[row][each], products);
          }
        }
        at += Int4Weight::kStepBytes;
        x += Groups::kEight;
      }
#pragma GCC unroll 8
      for (int each = 0; each < Parts; ++each) {
        const __m256i multiplier =
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(multipliers + 8 * each)));
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row) {
          const int32_t offset = eight == 0 ? of.offsets[row * of.offset_stride + number] : 0;
          const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(pairs[row][each], ones), _mm256_set1_epi32(offset));
          int32_t* const to = sums[row] + 8 * (part + each);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                              _mm256_add_epi32(load32(to), _mm256_mullo_epi32(sum, multiplier)));
        }
      }
    }
  }
}

// The columns at once whose sums fit the registers. For three rows these would be 16, which takes twice as long as two rows and one.
template <int Rows>
[[gnu::target("avx2")]] void int4_dots_avx2(const Int4Arguments& of, int32_t (*sums)[kBlock]) {
  constexpr int parts = Rows == 1 ? 8 : 4;
  std::fill_n(sums[0], Rows * kBlock, 0);
  for (int part = 0; part < 8; part += parts) {
    int4_dots_avx2<Rows, parts>(of, part, sums);
  }
}

#endif

}  // namespace polycast_cpu
