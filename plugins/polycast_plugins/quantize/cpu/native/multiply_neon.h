// Integer products by Arm's dot products of signed bytes, and by its products of 2 by 8 and 8 by 2 bytes (i8mm).
#pragma once

#include <cstdint>

#include "add_products.h"
#include "isa.h"
#include "layout.h"

namespace polycast_cpu {

#if defined(__aarch64__)

// Add the products of `Rows` rows by 4 * `Parts` columns to sums, 16 terms at once: the weight and the rows are padded to 64.
template <int Rows, int Parts>
[[gnu::target("arch=armv8.2-a+dotprod")]] void add_products_dotprod(const MultiplyArguments& of,
                                                                    int32_t (*sums)[kBlock]) {
  const uint8x16_t zero_point = vdupq_n_u8(kZeroPoint);
  int32x4_t sum[Rows][Parts];
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 16
    for (int part = 0; part < Parts; ++part) {
      sum[row][part] = vld1q_s32(sums[row] + 4 * part);
    }
  }
  const int8_t* block = of.block;
  for (int64_t four = 0; four < of.fours; four += 4, block += 16 * kBlock) {
    int8x16_t x[Rows];
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
      x[row] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(of.rows + row * of.stride + 4 * four), zero_point));
    }
#pragma GCC unroll 16
    for (int part = 0; part < Parts; ++part) {
      const int8_t* const columns = block + 16 * part;
      const int8x16_t first = vld1q_s8(columns), second = vld1q_s8(columns + 4 * kBlock);
      const int8x16_t third = vld1q_s8(columns + 8 * kBlock), fourth = vld1q_s8(columns + 12 * kBlock);
#pragma GCC unroll 16
      for (int row = 0; row < Rows; ++row) {
        int32x4_t each = vdotq_laneq_s32(sum[row][part], first, x[row], 0);
        each = vdotq_laneq_s32(each, second, x[row], 1);
        each = vdotq_laneq_s32(each, third, x[row], 2);
        sum[row][part] = vdotq_laneq_s32(each, fourth, x[row], 3);
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 16
    for (int part = 0; part < Parts; ++part) {
      vst1q_s32(sums[row] + 4 * part, sum[row][part]);
    }
  }
}

// Add the products of 2 * `Pairs` rows by 4 * `Parts` columns to sums, 8 terms at once.
template <int Pairs, int Parts>
[[gnu::target("arch=armv8.2-a+dotprod+i8mm")]] void add_products_i8mm(const MultiplyArguments& of,
                                                                      int32_t (*sums)[kBlock]) {
  const uint8x16_t zero_point = vdupq_n_u8(kZeroPoint);
  // Of two rows by columns 0 and 1, and by columns 2 and 3.
  int32x4_t low[Pairs][Parts], high[Pairs][Parts];
#pragma GCC unroll 16
  for (int pair = 0; pair < Pairs; ++pair) {
#pragma GCC unroll 16
    for (int part = 0; part < Parts; ++part) {
      const int32x4_t even = vld1q_s32(sums[2 * pair] + 4 * part), odd = vld1q_s32(sums[2 * pair + 1] + 4 * part);
      low[pair][part] = vcombine_s32(vget_low_s32(even), vget_low_s32(odd));
      high[pair][part] = vcombine_s32(vget_high_s32(even), vget_high_s32(odd));
    }
  }
  const int8_t* block = of.block;
  for (int64_t four = 0; four < of.fours; four += 2, block += 8 * kBlock) {
    int8x16_t x[Pairs];
#pragma GCC unroll 16
    for (int pair = 0; pair < Pairs; ++pair) {
      const uint8_t* const even = of.rows + 2 * pair * of.stride + 4 * four;
      const uint8x16_t both = vcombine_u8(vld1_u8(even), vld1_u8(even + of.stride));
      x[pair] = vreinterpretq_s8_u8(veorq_u8(both, zero_point));
    }
#pragma GCC unroll 16
    for (int part = 0; part < Parts; ++part) {
      // Eight terms of each of four columns.
      const int32x4_t first = vreinterpretq_s32_s8(vld1q_s8(block + 16 * part));
      const int32x4_t second = vreinterpretq_s32_s8(vld1q_s8(block + 16 * part + 4 * kBlock));
      const int8x16_t of_low = vreinterpretq_s8_s32(vzip1q_s32(first, second));
      const int8x16_t of_high = vreinterpretq_s8_s32(vzip2q_s32(first, second));
#pragma GCC unroll 16
      for (int pair = 0; pair < Pairs; ++pair) {
        low[pair][part] = vmmlaq_s32(low[pair][part], x[pair], of_low);
        high[pair][part] = vmmlaq_s32(high[pair][part], x[pair], of_high);
      }
    }
  }
#pragma GCC unroll 16
  for (int pair = 0; pair < Pairs; ++pair) {
#pragma GCC unroll 16
    for (int part = 0; part < Parts; ++part) {
      const int32x4_t of_low = low[pair][part], of_high = high[pair][part];
      vst1q_s32(sums[2 * pair] + 4 * part, vcombine_s32(vget_low_s32(of_low), vget_low_s32(of_high)));
      vst1q_s32(sums[2 * pair + 1] + 4 * part, vcombine_s32(vget_high_s32(of_low), vget_high_s32(of_high)));
    }
  }
}

constexpr int64_t padded_fours(int64_t terms) {
  return (terms + 15) / 16 * 4;
}

inline void multiply_dotprod(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* block, int64_t terms,
                             const int32_t* offsets, int64_t columns, int32_t (*sums)[kBlock]) {
  static constexpr AddProducts by_rows[] = {{add_products_dotprod<1, 16>, 64},
                                            {add_products_dotprod<2, 8>, 32},
                                            {add_products_dotprod<3, 4>, 16},
                                            {add_products_dotprod<4, 4>, 16}};
  begin_at_offsets(offsets, columns, count, sums);
  add_products(by_rows, by_rows, {rows, stride, block, padded_fours(terms)}, count, sums);
}

inline void multiply_i8mm(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* block, int64_t terms,
                          const int32_t* offsets, int64_t columns, int32_t (*sums)[kBlock]) {
  static constexpr AddProducts by_rows[] = {{add_products_dotprod<1, 16>, 64},
                                            {add_products_i8mm<1, 8>, 32},
                                            {add_products_dotprod<3, 4>, 16},
                                            {add_products_i8mm<2, 4>, 16}};
  begin_at_offsets(offsets, columns, count, sums);
  add_products(by_rows, by_rows, {rows, stride, block, padded_fours(terms)}, count, sums);
}

#endif

}  // namespace polycast_cpu
