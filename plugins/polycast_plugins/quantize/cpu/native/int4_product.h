// The product of quantized activations and a weight in 4 bits, on all threads. Neither the number of rows nor that of threads nor the
// instructions change a bit of it.
#pragma once

#include <optional>

#include "int4_rows.h"
#include "tensors.h"

namespace polycast_cpu {

inline Simd simd_of(Isa isa) {
  return has_avx512(isa) ? Simd::avx512 : has_avx2(isa) ? Simd::avx2 : Simd::plain;
}

template <typename T>
void int4_product(Isa isa, const ChunkedActivations& x, const Int4Weight& weight, const Bias& bias, T* out) {
  const bool direct = is_direct(isa, x.rows, weight.groups);
  const int64_t in_a_row = blocks(weight.columns), turns = (x.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  for_each_part(turns * in_a_row, grain(Int4Weight::block_bytes(weight.groups)), [&](int64_t begin, int64_t end) {
#if defined(__x86_64__)
    std::optional<Tiles> tiles;
    if (isa == Isa::amx && !direct) {
      tiles.emplace();
    }
#endif
    alignas(64) float totals[kRowsAtOnce][kBlock];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task % in_a_row;
      const int64_t first = task / in_a_row * kRowsAtOnce, last = std::min(x.rows, first + kRowsAtOnce);
      std::fill_n(totals[0], (last - first) * kBlock, 0.0f);
      direct ? multiply_directly(isa, x, first, last, weight, block, totals)
             : multiply_unpacked(isa, x, first, last, weight, block, totals);
      for (int64_t row = first; row < last; ++row) {
        const int64_t column = block * kBlock;
        apply_epilogue(simd_of(isa), totals[row - first], 1, bias.row(row) == nullptr ? nullptr : bias.row(row) + column,
                       std::min(kBlock, weight.columns - column), out + row * weight.columns + column);
      }
    }
  });
}

}  // namespace polycast_cpu
