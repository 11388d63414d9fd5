// How quantized matrices lie in memory, and what a product is made of.
#pragma once

#include <cstdint>

namespace polycast_cpu {

// Columns of the product, and terms of its sums, come in blocks of 64; what is missing in the last ones is zero.
constexpr int64_t kBlock = 64;

constexpr int64_t blocks(int64_t size) {
  return (size + kBlock - 1) / kBlock;
}

// A weight of N columns and K terms, in signed bytes: for each block of columns, for each four terms, 64 columns of these
// four. That is the order in which vpdpbusd reads it, and 16 of the columns by 64 terms are a tile of AMX.
struct Weight {
  const int8_t* values;
  const float* scales;     // of each column
  const int32_t* offsets;  // what the zero point of the activations, 128, adds to each column
  int64_t columns, terms;

  const int8_t* block(int64_t number) const {
    return values + number * blocks(terms) * kBlock * kBlock;
  }

  float value(int64_t column, int64_t term) const {
    return block(column / kBlock)[(term / 4 * kBlock + column % kBlock) * 4 + term % 4];
  }
};

// Activations in unsigned bytes with zero point 128, row by row. `stride` is no multiple of 4096: rows that are would
// share one set of the L1 cache.
struct Activations {
  const uint8_t* values;
  const float* scales;  // of each row
  int64_t rows, stride;
};

constexpr int64_t row_stride(int64_t terms) {
  return (blocks(terms) + 1) * kBlock;
}

constexpr uint8_t kZeroPoint = 128;
constexpr float kLevels = 127;

// Rows that are smaller are quantized as if this were in them, so that scales and their inverses stay normal numbers.
constexpr float kSmallest = 0x1p-110f;
// Weights that are larger are refused, so that no sum overflows before it is scaled.
constexpr float kLargestWeight = 0x1p100f;
// Longer sums of products of unsigned and signed bytes may not fit 32 bits.
constexpr int64_t kMostTerms = 65536;

}  // namespace polycast_cpu
