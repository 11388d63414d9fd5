// Transposition of matrices with elements of one, two or four bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "isa.h"

namespace polycast_cpu {

template <typename T>
void transpose_plain(const T* from, int64_t rows, int64_t columns, int64_t stride, T* to, int64_t to_stride) {
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < rows; ++row) {
      to[column * to_stride + row] = from[row * stride + column];
    }
  }
}

#if defined(__x86_64__)

// Interleave the elements of the lower or the upper halves of two registers.
template <int Size, bool Upper>
__m128i interleaved(__m128i a, __m128i b) {
  if constexpr (Size == 1) {
    return Upper ? _mm_unpackhi_epi8(a, b) : _mm_unpacklo_epi8(a, b);
  } else if constexpr (Size == 2) {
    return Upper ? _mm_unpackhi_epi16(a, b) : _mm_unpacklo_epi16(a, b);
  } else {
    return Upper ? _mm_unpackhi_epi32(a, b) : _mm_unpacklo_epi32(a, b);
  }
}

// Transpose a square in registers: interleaving each row with the one half a square below swaps one bit of the indices.
template <typename T>
void transpose_square(const T* from, int64_t stride, T* to, int64_t to_stride) {
  constexpr int size = sizeof(T), side = 16 / size;
  __m128i rows[side], turned[side];
#pragma GCC unroll 16
  for (int i = 0; i < side; ++i) {
    rows[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
  }
#pragma GCC unroll 4
  for (int bits = side; bits > 1; bits /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < side / 2; ++i) {
      turned[2 * i] = interleaved<size, false>(rows[i], rows[i + side / 2]);
      turned[2 * i + 1] = interleaved<size, true>(rows[i], rows[i + side / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < side; ++i) {
      rows[i] = turned[i];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < side; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), rows[i]);
  }
}

#endif

// Transpose [rows, columns] to [columns, rows], with strides between rows.
template <typename T>
void transpose(const T* from, int64_t rows, int64_t columns, int64_t stride, T* to, int64_t to_stride) {
#if defined(__x86_64__)
  constexpr int64_t side = 16 / sizeof(T);
#else
  constexpr int64_t side = 32;
#endif
  for (int64_t row = 0; row < rows; row += side) {
    for (int64_t column = 0; column < columns; column += side) {
      const T* corner = from + row * stride + column;
      T* turned = to + column * to_stride + row;
#if defined(__x86_64__)
      if (row + side <= rows && column + side <= columns) {
        transpose_square(corner, stride, turned, to_stride);
        continue;
      }
#endif
      transpose_plain(corner, std::min(side, rows - row), std::min(side, columns - column), stride, turned, to_stride);
    }
  }
}

}  // namespace polycast_cpu
