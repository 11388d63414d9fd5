// Products of some rows by a block, in groups of rows and columns whose sums fit the registers: fewer rows take more columns.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout.h"

namespace polycast_cpu {

// Groups of four terms that all rows are multiplied by before the next ones: 16 KiB of the weight, which stay in the L1 cache.
constexpr int64_t kFoursAtOnce = 64;

// Rows of activations, and a part of a block of the weight.
struct MultiplyArguments {
  const uint8_t* rows;
  int64_t stride;
  const int8_t* block;
  int64_t fours;
};

// A function for some rows, and how many columns it takes at once.
struct AddProducts {
  void (*function)(const MultiplyArguments&, int32_t (*)[kBlock]);
  int64_t columns;
};

// Add the products of rows by a block to sums, by the functions for 1, 2, ... rows: the first group of rows fetches the weight.
template <size_t Most>
void add_products(const AddProducts (&fetching)[Most], const AddProducts (&others)[Most], const MultiplyArguments& all,
                  int64_t count, int32_t (*sums)[kBlock]) {
  constexpr auto most = static_cast<int64_t>(Most);
  for (int64_t four = 0; four < all.fours; four += kFoursAtOnce) {
    for (int64_t row = 0; row < count;) {
      // Five rows are three and two, not four and one.
      const int64_t left = count - row, turns = (left + most - 1) / most, now = (left + turns - 1) / turns;
      const AddProducts& add = (row == 0 ? fetching : others)[now - 1];
      for (int64_t column = 0; column < kBlock; column += add.columns) {
        const MultiplyArguments part{all.rows + row * all.stride + 4 * four, all.stride,
                                     all.block + 4 * (four * kBlock + column), std::min(kFoursAtOnce, all.fours - four)};
        add.function(part, reinterpret_cast<int32_t(*)[kBlock]>(sums[row] + column));
      }
      row += now;
    }
  }
}

// Sums of products of signed activations begin at the offsets, to become those of unsigned ones.
inline void begin_at_offsets(const int32_t* offsets, int64_t columns, int64_t count, int32_t (*sums)[kBlock]) {
  for (int64_t row = 0; row < count; ++row) {
    std::fill(std::copy_n(offsets, columns, sums[row]), sums[row] + kBlock, 0);
  }
}

}  // namespace polycast_cpu
