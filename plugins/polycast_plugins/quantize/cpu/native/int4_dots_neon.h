// Integer sums of one chunk of a weight in 4 bits by Arm's dot products of signed bytes. Products of i8mm would save nothing for so
// few rows.
#pragma once

#include <algorithm>

#include "int4_dots.h"

namespace polycast_cpu {

#if defined(__aarch64__)

// `Rows` rows by `Parts` times 8 columns, of which the first is `8 * part`.
template <int Rows, int Parts>
[[gnu::target("arch=armv8.2-a+dotprod")]] void int4_dots_neon(const Int4Arguments& of, int part,
                                                              int32_t (*sums)[kBlock]) {
  const uint8x16_t low_half = vdupq_n_u8(15);
  const uint8_t* at = of.chunk + Int4Weight::kScaleBytes;
  const int8_t* x = of.x;
  const int32_t* offsets = of.offsets;
  for (int64_t first = 0; first < of.count; first += of.group, ++offsets) {
    const auto* const multipliers = reinterpret_cast<const int8_t*>(at) + 8 * part;
    at += Int4Weight::kMultiplierBytes;
    int32x4_t of_group[Rows][2 * Parts];
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 16
      for (int four = 0; four < 2 * Parts; ++four) {
        of_group[row][four] = vdupq_n_s32(offsets[row * of.offset_stride]);
      }
    }
    for (int64_t step = Groups::eights(std::min(of.group, of.count - first)); step > 0; --step) {
      int8x8_t eight[Rows];
#pragma GCC unroll 16
      for (int row = 0; row < Rows; ++row) {
        eight[row] = vld1_s8(x + row * of.x_stride);
      }
#pragma GCC unroll 16
      for (int four = 0; four < 2 * Parts; ++four) {
        const uint8x16_t both = vld1q_u8(at + 32 * part + 16 * four);
        const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(both, low_half));
        const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
#pragma GCC unroll 16
        for (int row = 0; row < Rows; ++row) {
          int32x4_t& sum = of_group[row][four];
          sum = vdotq_lane_s32(vdotq_lane_s32(sum, low, eight[row], 0), high, eight[row], 1);
        }
      }
      at += Int4Weight::kStepBytes;
      x += Groups::kEight;
    }
#pragma GCC unroll 16
    for (int each = 0; each < Parts; ++each) {
      const int16x8_t multiplier = vmovl_s8(vld1_s8(multipliers + 8 * each));
      const int32x4_t of_fours[] = {vmovl_s16(vget_low_s16(multiplier)), vmovl_s16(vget_high_s16(multiplier))};
#pragma GCC unroll 16
      for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 16
        for (int half = 0; half < 2; ++half) {
          int32_t* const to = sums[row] + 8 * (part + each) + 4 * half;
          vst1q_s32(to, vmlaq_s32(vld1q_s32(to), of_group[row][2 * each + half], of_fours[half]));
        }
      }
    }
  }
}

// The columns at once whose sums fit the registers.
template <int Rows>
[[gnu::target("arch=armv8.2-a+dotprod")]] void int4_dots_neon(const Int4Arguments& of, int32_t (*sums)[kBlock]) {
  constexpr int parts = Rows == 1 ? 8 : 4;
  std::fill_n(sums[0], Rows * kBlock, 0);
  for (int part = 0; part < 8; part += parts) {
    int4_dots_neon<Rows, parts>(of, part, sums);
  }
}

#endif

}  // namespace polycast_cpu
