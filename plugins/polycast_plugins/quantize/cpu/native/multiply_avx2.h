// Integer products by AVX2, without and with its dot products of bytes (AVX-VNNI).
#pragma once

#include "add_products.h"
#include "isa.h"
#include "layout.h"
#include "vectors_avx2.h"

namespace polycast_cpu {

#if defined(__x86_64__)

// Distance, in bytes, by which the weight is fetched ahead of its use.
constexpr int64_t kBytesAhead = 2048;

// Add the products of `Rows` rows by 8 * `Parts` columns to sums. The instruction that adds pairs of products of unsigned and signed
// bytes saturates at 16 bits, which magnitudes of up to 127 do not reach. So the activations' zero point is subtracted, and the
// sign of the weight is moved to them: sums are of signed activations.
template <int Rows, int Parts, bool Prefetches>
[[gnu::target("avx2")]] void add_products_avx2(const MultiplyArguments& of, int32_t (*sums)[kBlock]) {
  const __m256i ones = _mm256_set1_epi16(1), zero_point = _mm256_set1_epi8(static_cast<char>(kZeroPoint));
  __m256i sum[Rows][Parts];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int part = 0; part < Parts; ++part) {
      sum[row][part] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums[row] + 8 * part));
    }
  }
  const int8_t* block = of.block;
  for (int64_t four = 0; four < of.fours; ++four, block += 4 * kBlock) {
    if constexpr (Prefetches) {
#pragma GCC unroll 8
      for (int part = 0; part < Parts; part += 2) {
        _mm_prefetch(reinterpret_cast<const char*>(block) + kBytesAhead + 32 * part, _MM_HINT_T0);
      }
    }
    __m256i x[Rows];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      x[row] = _mm256_xor_si256(repeat_four(of.rows + row * of.stride + 4 * four), zero_point);
    }
#pragma GCC unroll 8
    for (int part = 0; part < Parts; ++part) {
      const __m256i weight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32 * part));
      const __m256i magnitudes = _mm256_abs_epi8(weight);
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x[row], weight));
        sum[row][part] = _mm256_add_epi32(sum[row][part], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int part = 0; part < Parts; ++part) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums[row] + 8 * part), sum[row][part]);
    }
  }
}

// Add the products of `Rows` rows by 8 * `Parts` columns to sums.
template <int Rows, int Parts, bool Prefetches>
[[gnu::target("avx2,avxvnni")]] void add_products_avx_vnni(const MultiplyArguments& of, int32_t (*sums)[kBlock]) {
  __m256i sum[Rows][Parts];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int part = 0; part < Parts; ++part) {
      sum[row][part] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums[row] + 8 * part));
    }
  }
  const int8_t* block = of.block;
  for (int64_t four = 0; four < of.fours; ++four, block += 4 * kBlock) {
    if constexpr (Prefetches) {
#pragma GCC unroll 8
      for (int part = 0; part < Parts; part += 2) {
        _mm_prefetch(reinterpret_cast<const char*>(block) + kBytesAhead + 32 * part, _MM_HINT_T0);
      }
    }
    __m256i x[Rows];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      x[row] = repeat_four(of.rows + row * of.stride + 4 * four);
    }
#pragma GCC unroll 8
    for (int part = 0; part < Parts; ++part) {
      const __m256i weight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32 * part));
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        sum[row][part] = _mm256_dpbusd_avx_epi32(sum[row][part], x[row], weight);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int part = 0; part < Parts; ++part) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums[row] + 8 * part), sum[row][part]);
    }
  }
}

inline void multiply_avx2(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* block, int64_t terms,
                          const int32_t* offsets, int64_t columns, int32_t (*sums)[kBlock]) {
  static constexpr AddProducts fetching[] = {{add_products_avx2<1, 8, true>, 64},
                                             {add_products_avx2<2, 4, true>, 32},
                                             {add_products_avx2<3, 2, true>, 16},
                                             {add_products_avx2<4, 2, true>, 16}};
  static constexpr AddProducts others[] = {{add_products_avx2<1, 8, false>, 64},
                                           {add_products_avx2<2, 4, false>, 32},
                                           {add_products_avx2<3, 2, false>, 16},
                                           {add_products_avx2<4, 2, false>, 16}};
  begin_at_offsets(offsets, columns, count, sums);
  add_products(fetching, others, {rows, stride, block, (terms + 3) / 4}, count, sums);
}

inline void multiply_avx_vnni(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* block, int64_t terms,
                              int32_t (*sums)[kBlock]) {
  static constexpr AddProducts fetching[] = {{add_products_avx_vnni<1, 8, true>, 64},
                                             {add_products_avx_vnni<2, 4, true>, 32},
                                             {add_products_avx_vnni<3, 4, true>, 32}};
  static constexpr AddProducts others[] = {{add_products_avx_vnni<1, 8, false>, 64},
                                           {add_products_avx_vnni<2, 4, false>, 32},
                                           {add_products_avx_vnni<3, 4, false>, 32}};
  for (int64_t row = 0; row < count; ++row) {
    std::fill_n(sums[row], kBlock, 0);
  }
  add_products(fetching, others, {rows, stride, block, (terms + 3) / 4}, count, sums);
}

#endif

}  // namespace polycast_cpu
