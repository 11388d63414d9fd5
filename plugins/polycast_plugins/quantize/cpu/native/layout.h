// Memory layouts of quantized weights and activations.
#pragma once

#include <cstdint>

namespace polycast_cpu {

// Columns and terms are in blocks of 64, zero-padded.
constexpr int64_t kBlock = 64;

constexpr int64_t blocks(int64_t size) {
  return (size + kBlock - 1) / kBlock;
}

// A weight of N columns and K terms, in signed bytes. Each block of 64 columns stores groups of four terms, column by column: the
// order in which vpdpbusd reads it. 16 columns by 64 terms are an AMX tile.
struct Weight {
  const int8_t* values;
  const float* scales;     // of each column
  const int32_t* offsets;  // of each column, due to the zero point of the activations
  int64_t columns, terms;

  const int8_t* block(int64_t number) const {
    return values + number * blocks(terms) * kBlock * kBlock;
  }

  float value(int64_t column, int64_t term) const {
    return block(column / kBlock)[(term / 4 * kBlock + column % kBlock) * 4 + term % 4];
  }
};

// Activations in unsigned bytes with zero point 128, row by row. `stride` is not a multiple of 4096, which would map all rows to
// the same set of the L1 cache.
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

// The least magnitude that a scale is made for, so that scales and their inverses are normal numbers.
constexpr float kSmallest = 0x1p-110f;
// Larger weights are rejected, so that no sum overflows before it is scaled.
constexpr float kLargestWeight = 0x1p100f;

}  // namespace polycast_cpu
