// Products by a weight [N, K] with dense rows: dot products, which each load of the weight serves for all rows of activations.
//
// A dot product is summed in the same order whatever is computed beside it.
#pragma once

#include <array>

#include "simd.h"

namespace polycast_cpu {

// The most rows of activations in registers.
constexpr int64_t kDotRows = 4;
// The columns whose sums are finished together.
constexpr int64_t kDots = 64;
// The rows of the weight that are read at once.
constexpr int64_t kStreams = 4;
// How far ahead of its use the weight is fetched from memory, in bytes: faster than hardware prefetchers follow.
constexpr int64_t kAhead = 2048;

// The activations and the part of the weight that a dot product needs.
template <typename T>
struct DotArguments {
  const T* weight;
  int64_t stride;
  const float* x;
  int64_t x_stride, terms;
};

template <int Columns, int Rows, typename T>
void dots_plain(const DotArguments<T>& of, float (*sums)[kDots]) {
  constexpr int lanes = 8;
  for (int row = 0; row < Rows; ++row) {
    const float* const x = of.x + row * of.x_stride;
    for (int column = 0; column < Columns; ++column) {
      const T* const weight = of.weight + column * of.stride;
      float partial[lanes] = {};
      for (int64_t k = 0; k < of.terms; ++k) {
        partial[k % lanes] += x[k] * static_cast<float>(weight[k]);
      }
      float sum = 0;
      for (float each : partial) {
        sum += each;
      }
      sums[row][column] = sum;
    }
  }
}

#if defined(__x86_64__)

// Return what to prefetch for a place in a row: the rest of the row, then the next rows.
template <int Columns, typename T>
const T* ahead(const DotArguments<T>& of, int64_t k) {
  const int64_t place = k + kAhead / static_cast<int64_t>(sizeof(T));
  return of.weight + (place < of.terms ? place : Columns * of.stride + place - of.terms);
}

template <int Columns, int Rows, typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void dots_avx512(const DotArguments<T>& of, float (*sums)[kDots]) {
  __m512 sum[Rows][Columns];
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      sum[row][column] = _mm512_setzero_ps();
    }
  }
  int64_t k = 0;
  for (; k + 32 <= of.terms; k += 32) {
    const T* const later = ahead<Columns>(of, k);
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      _mm_prefetch(reinterpret_cast<const char*>(later + column * of.stride), _MM_HINT_T0);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 32; half += 16) {
      __m512 x[Rows];
#pragma GCC unroll 4
      for (int row = 0; row < Rows; ++row) {
        x[row] = _mm512_loadu_ps(of.x + row * of.x_stride + k + half);
      }
#pragma GCC unroll 4
      for (int column = 0; column < Columns; ++column) {
        const __m512 weight = load16(of.weight + column * of.stride + k + half, 0xffff);
#pragma GCC unroll 4
        for (int row = 0; row < Rows; ++row) {
          sum[row][column] = _mm512_fmadd_ps(x[row], weight, sum[row][column]);
        }
      }
    }
  }
  for (; k < of.terms; k += 16) {
    const __mmask16 mask = first16(of.terms - k);
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      const __m512 weight = load16(of.weight + column * of.stride + k, mask);
#pragma GCC unroll 4
      for (int row = 0; row < Rows; ++row) {
        const __m512 x = load16(of.x + row * of.x_stride + k, mask);
        sum[row][column] = _mm512_fmadd_ps(x, weight, sum[row][column]);
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      sums[row][column] = _mm512_reduce_add_ps(sum[row][column]);
    }
  }
}

template <int Columns, int Rows, typename T>
[[gnu::target("avx2,fma,f16c")]] void dots_avx2(const DotArguments<T>& of, float (*sums)[kDots]) {
  __m256 sum[Rows][Columns];
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      sum[row][column] = _mm256_setzero_ps();
    }
  }
  int64_t k = 0;
  for (; k + 32 <= of.terms; k += 32) {
    const T* const later = ahead<Columns>(of, k);
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      _mm_prefetch(reinterpret_cast<const char*>(later + column * of.stride), _MM_HINT_T0);
    }
#pragma GCC unroll 4
    for (int part = 0; part < 32; part += 8) {
#pragma GCC unroll 4
      for (int column = 0; column < Columns; ++column) {
        const __m256 weight = load8(of.weight + column * of.stride + k + part);
#pragma GCC unroll 4
        for (int row = 0; row < Rows; ++row) {
          const __m256 x = _mm256_loadu_ps(of.x + row * of.x_stride + k + part);
          sum[row][column] = _mm256_fmadd_ps(x, weight, sum[row][column]);
        }
      }
    }
  }
  for (; k < of.terms; k += 8) {
    const int64_t left = std::min<int64_t>(8, of.terms - k);
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      const __m256 weight = load_first8(of.weight + column * of.stride + k, left);
#pragma GCC unroll 4
      for (int row = 0; row < Rows; ++row) {
        const __m256 x = load_first8(of.x + row * of.x_stride + k, left);
        sum[row][column] = _mm256_fmadd_ps(x, weight, sum[row][column]);
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      sums[row][column] = sum8(sum[row][column]);
    }
  }
}

#endif

// Compute the dot products of up to kDotRows rows with `Columns` columns.
template <int Columns, typename T>
void dots(Simd simd, int64_t rows, const DotArguments<T>& of, float (*sums)[kDots]) {
  using Function = void (*)(const DotArguments<T>&, float (*)[kDots]);
#if defined(__x86_64__)
  static constexpr std::array<Function, kDotRows> by_rows[] = {
      {dots_plain<Columns, 1, T>, dots_plain<Columns, 2, T>, dots_plain<Columns, 3, T>, dots_plain<Columns, 4, T>},
      {dots_avx2<Columns, 1, T>, dots_avx2<Columns, 2, T>, dots_avx2<Columns, 3, T>, dots_avx2<Columns, 4, T>},
      {dots_avx512<Columns, 1, T>, dots_avx512<Columns, 2, T>, dots_avx512<Columns, 3, T>, dots_avx512<Columns, 4, T>}};
#else
  static constexpr std::array<Function, kDotRows> by_rows[] = {
      {dots_plain<Columns, 1, T>, dots_plain<Columns, 2, T>, dots_plain<Columns, 3, T>, dots_plain<Columns, 4, T>}};
#endif
  by_rows[static_cast<int64_t>(simd)][rows - 1](of, sums);
}

}  // namespace polycast_cpu
