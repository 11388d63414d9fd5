// Quantization of rows in plain C++.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "layout.h"

namespace polycast_cpu {

// Magnitudes are compared as bits, which have the same order; inf is above all numbers, and nan above inf.
template <typename T>
uint32_t largest_magnitude_plain(const T* row, int64_t terms) {
  uint32_t largest = 0;
  for (int64_t k = 0; k < terms; ++k) {
    largest = std::max(largest, std::bit_cast<uint32_t>(static_cast<float>(row[k])) & 0x7fffffffu);
  }
  return largest;
}

template <typename T>
void quantize_row_plain(const T* row, int64_t terms, float inverse, uint8_t* out) {
  for (int64_t k = 0; k < terms; ++k) {
    out[k] = static_cast<uint8_t>(static_cast<int>(std::nearbyint(static_cast<float>(row[k]) * inverse)) + kZeroPoint);
  }
}

}  // namespace polycast_cpu
