// The product of quantized activations and a weight, on all threads.
#pragma once

#include "dequantize.h"
#include "layout.h"
#include "multiply.h"
#include "multiply_avx2.h"
#include "multiply_neon.h"
#include "parts.h"

namespace polycast_cpu {

// The rows that stay in the cache during one pass over the weight.
constexpr int64_t kRowsAtOnce = 256;
// Up to so many rows use VNNI, since they would leave AMX tiles mostly empty.
constexpr int64_t kMaxRowsWithoutAmx = 4;

inline void multiply(Isa isa, const Activations& x, int64_t row, int64_t count, const Weight& weight, int64_t number,
                     int32_t (*sums)[kBlock]) {
  const uint8_t* const rows = x.values + row * x.stride;
  const int8_t* const block = weight.block(number);
  [[maybe_unused]] const int32_t* const offsets = weight.offsets + number * kBlock;
  [[maybe_unused]] const int64_t columns = std::min(kBlock, weight.columns - number * kBlock);
  switch (isa) {
#if defined(__x86_64__)
    case Isa::amx:
      return multiply_amx(rows, x.stride, count, block, weight.terms, sums);
    case Isa::vnni:
      return multiply_vnni(rows, x.stride, count, block, weight.terms, weight.columns * weight.terms, sums);
    case Isa::avx_vnni:
      return multiply_avx_vnni(rows, x.stride, count, block, weight.terms, sums);
    case Isa::avx2:
      return multiply_avx2(rows, x.stride, count, block, weight.terms, offsets, columns, sums);
#elif defined(__aarch64__)
    case Isa::i8mm:
      return multiply_i8mm(rows, x.stride, count, block, weight.terms, offsets, columns, sums);
    case Isa::dotprod:
      return multiply_dotprod(rows, x.stride, count, block, weight.terms, offsets, columns, sums);
#endif
    default:
      return multiply_plain(rows, x.stride, count, block, weight.terms, sums);
  }
}

template <typename T>
void multiply_blocks(Isa isa, const Activations& x, const Weight& weight, const float* bias, int64_t bias_step,
                     int64_t begin, int64_t end, T* out) {
  alignas(64) int32_t sums[kMaxRows][kBlock];
  const int64_t in_a_row = blocks(weight.columns);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t block = task % in_a_row, column = block * kBlock;
    const int64_t first = task / in_a_row * kRowsAtOnce, last = std::min(x.rows, first + kRowsAtOnce);
    for (int64_t row = first; row < last; row += kMaxRows) {
      const int64_t count = std::min(kMaxRows, last - row);
      multiply(isa, x, row, count, weight, block, sums);
      for (int64_t i = 0; i < count; ++i) {
        dequantize_row(isa, sums[i], weight.offsets + column, weight.scales + column, x.scales[row + i],
                       bias == nullptr ? nullptr : bias + (row + i) * bias_step + column,
                       std::min(kBlock, weight.columns - column), out + (row + i) * weight.columns + column);
      }
    }
  }
}

template <typename T>
void product(Isa isa, const Activations& x, const Weight& weight, const float* bias, int64_t bias_step, T* out) {
  const int64_t turns = (x.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  if (isa == Isa::amx && x.rows <= kMaxRowsWithoutAmx) {
    isa = Isa::vnni;
  }
  for_each_part(turns * blocks(weight.columns), grain(blocks(weight.terms) * kBlock * kBlock),
                [&](int64_t begin, int64_t end) {
#if defined(__x86_64__)
                  if (isa == Isa::amx) {
                    const Tiles tiles;
                    return multiply_blocks(isa, x, weight, bias, bias_step, begin, end, out);
                  }
#endif
                  multiply_blocks(isa, x, weight, bias, bias_step, begin, end, out);
                });
}

}  // namespace polycast_cpu
