// Products by a weight whose columns are dense: dot products. Several columns are computed at once, so that the processor does not
// wait for additions, and each load serves several rows and columns.
//
// A dot product is summed in the same order whatever is computed beside it.
#pragma once

#include <algorithm>

#include "simd.h"

namespace polycast_cpu {

// The most rows of activations in registers.
constexpr int64_t kDotRows = 4;
// The columns whose sums are finished together.
constexpr int64_t kDots = 64;

// The activations and the part of the weight that a dot product needs.
template <typename T>
struct DotArguments {
  const T* weight;
  int64_t stride;
  const float* x;
  int64_t x_stride, terms;
  // By how many elements of a column prefetches precede reads; 0: only the processor prefetches; kNextColumns: the columns after those
  // that are read are prefetched in the order of memory, for processors whose prefetcher crosses pages.
  int64_t ahead;
};

constexpr int64_t kNextColumns = -1;

template <typename T>
void dots_plain(const DotArguments<T>& of, float (*sums)[kDots]) {
  constexpr int lanes = 8;
  float partial[lanes] = {};
  int64_t k = 0;
  for (; k + lanes <= of.terms; k += lanes) {
    for (int lane = 0; lane < lanes; ++lane) {
      partial[lane] += of.x[k + lane] * static_cast<float>(of.weight[k + lane]);
    }
  }
  float sum = 0;
  for (; k < of.terms; ++k) {
    sum += of.x[k] * static_cast<float>(of.weight[k]);
  }
  for (float each : partial) {
    sum += each;
  }
  sums[0][0] = sum;
}

#if defined(__x86_64__)

// Prefetch 32 elements of each column: of the rest of the columns, then of the next ones. Inline, since compilers remove calls of
// functions that only prefetch.
template <int Columns, typename T>
[[gnu::always_inline]] inline void prefetch(const DotArguments<T>& of, int64_t k) {
  if (of.ahead == kNextColumns) {
    const T* const next = of.weight + Columns * (of.stride + k);  // as if nothing lay between the columns
#pragma GCC unroll 8
    for (int element = 0; element < 32 * Columns; element += 64 / sizeof(T)) {
      _mm_prefetch(reinterpret_cast<const char*>(next + element), _MM_HINT_T1);
    }
    return;
  }
  constexpr int64_t page = 4096 / sizeof(T);
  if (of.ahead == 0 && Columns == 1 && k % page == 0) {  // looks up that page's address before the processor's prefetcher comes to it
    _mm_prefetch(reinterpret_cast<const char*>(of.weight + k + 4 * page), _MM_HINT_T1);
  }
  if (of.ahead > 0) {
    const int64_t place = k + of.ahead;
    const T* const later = of.weight + (place < of.terms ? place : Columns * of.stride + place - of.terms);
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      for (int element = 0; element < 32; element += 64 / sizeof(T)) {
        __builtin_prefetch(later + column * of.stride + element);
      }
    }
  }
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
    prefetch<Columns>(of, k);
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
        sum[row][column] = _mm512_fmadd_ps(load16(of.x + row * of.x_stride + k, mask), weight, sum[row][column]);
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

// A dot product has two partial sums, of every other vector of eight terms: one would wait for each addition.
template <int Columns, int Rows, typename T>
[[gnu::target("avx2,fma,f16c")]] void dots_avx2(const DotArguments<T>& of, float (*sums)[kDots]) {
  __m256 sum[Rows][Columns][2];
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      sum[row][column][0] = sum[row][column][1] = _mm256_setzero_ps();
    }
  }
  int64_t k = 0;
  for (; k + 32 <= of.terms; k += 32) {
    prefetch<Columns>(of, k);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      __m256 x[Rows];
#pragma GCC unroll 4
      for (int row = 0; row < Rows; ++row) {
        x[row] = _mm256_loadu_ps(of.x + row * of.x_stride + k + 8 * part);
      }
#pragma GCC unroll 4
      for (int column = 0; column < Columns; ++column) {
        const __m256 weight = load8(of.weight + column * of.stride + k + 8 * part);
#pragma GCC unroll 4
        for (int row = 0; row < Rows; ++row) {
          sum[row][column][part % 2] = _mm256_fmadd_ps(x[row], weight, sum[row][column][part % 2]);
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
        sum[row][column][0] =
            _mm256_fmadd_ps(load_first8(of.x + row * of.x_stride + k, left), weight, sum[row][column][0]);
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) {
      sums[row][column] = sum8(_mm256_add_ps(sum[row][column][0], sum[row][column][1]));
    }
  }
}

#endif

// The function that computes the dot products of some rows and columns at once, and how many of either.
template <typename T>
struct Dots {
  void (*function)(const DotArguments<T>&, float (*)[kDots]);
  int64_t rows, columns;
};

// Return the one for a number of rows and columns: the largest that is not larger than either. `in_memory_order`: the weight is
// read column by column.
template <typename T>
Dots<T> dots_for(Simd simd, int64_t rows, int64_t columns, bool in_memory_order) {
#if defined(__x86_64__)
  static constexpr Dots<T> avx512[2][kDotRows] = {{{dots_avx512<1, 1, T>, 1, 1},
                                                   {dots_avx512<1, 2, T>, 2, 1},
                                                   {dots_avx512<1, 3, T>, 3, 1},
                                                   {dots_avx512<1, 4, T>, 4, 1}},
                                                  {{dots_avx512<4, 1, T>, 1, 4},
                                                   {dots_avx512<4, 2, T>, 2, 4},
                                                   {dots_avx512<4, 3, T>, 3, 4},
                                                   {dots_avx512<4, 4, T>, 4, 4}}};
  static constexpr Dots<T> avx2[2][2] = {{{dots_avx2<1, 1, T>, 1, 1}, {dots_avx2<1, 2, T>, 2, 1}},
                                         {{dots_avx2<4, 1, T>, 1, 4}, {dots_avx2<2, 2, T>, 2, 2}}};
  const bool several = !in_memory_order;
  if (simd == Simd::avx512) {
    return avx512[several && columns >= 4][std::min(rows, kDotRows) - 1];
  }
  if (simd == Simd::avx2) {
    const int64_t number = std::min<int64_t>(rows, 2) - 1;
    return avx2[several && columns >= avx2[1][number].columns][number];
  }
#endif
  return {dots_plain<T>, 1, 1};
}

}  // namespace polycast_cpu
