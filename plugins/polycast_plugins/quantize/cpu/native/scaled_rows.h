// Products by a weight [K, N] with dense rows: sums of its rows, each scaled by an activation.
//
// A sum is made in the order of the rows whatever is computed beside it.
#pragma once

#include <algorithm>
#include <array>
#include <memory>

#include "simd.h"

namespace polycast_cpu {

// The rows for which the weight is read once.
constexpr int64_t kRowsPerRead = 8;
// The most rows of activations for one load of the weight.
constexpr int64_t kScaledRows = 4;
// The columns whose sums stay in a cache: for one row of activations, for several, and for any number where the prefetcher crosses
// pages. Memory is read the faster the more of a row of the weight is read at once.
constexpr int64_t kTile = 4096, kTileOfSeveral = 1024, kTileInMemoryOrder = 6144;
// Between the sums of two rows; no multiple of 4096 bytes, which would map them to the same set of the L1 cache.
constexpr int64_t kSumStride = kTileInMemoryOrder + 16;
// The rows of the weight that are read at once, and how many rows before their use they are prefetched.
constexpr int64_t kTerms = 4;
constexpr int64_t kTermsAhead = 16;
// The same where the prefetcher crosses pages: it does not follow eight rows that are read at once, so the next eight are prefetched,
// in the order of memory.
constexpr int64_t kTermsInMemoryOrder = 8;

// The rows of the weight to add, starting at `weight`; the rows to prefetch meanwhile, starting at `ahead` (`weight` itself if there
// are none); and the activations `x` that scale the rows to add. `width`: the columns.
template <typename T>
struct ScaledArguments {
  const T* weight;
  const T* ahead;
  int64_t stride;
  const float* x;
  int64_t x_stride, width;
};

#if defined(__x86_64__)

// Prefetches rows of the weight: a cache line of each at a time into the L1 cache, or as many lines in the order of memory into the
// L2 cache.
template <int Terms, typename T>
class Prefetch {
 public:
  static_assert(kTerms != kTermsInMemoryOrder);
  static constexpr bool in_memory_order = Terms == kTermsInMemoryOrder;

  explicit Prefetch(const ScaledArguments<T>& of)
      : at_(of.ahead), end_(of.ahead + of.width), gap_(of.stride - of.width), stride_(of.stride) {}

  // To call once for each cache line of a row.
  void next() {
    constexpr int64_t line = 64 / sizeof(T);
#pragma GCC unroll 8
    for (int term = 0; term < Terms; ++term) {
      if constexpr (in_memory_order) {
        _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T1);
        at_ += line;
        if (at_ >= end_) {
          at_ = end_ + gap_;
          end_ += stride_;
        }
      } else {
        _mm_prefetch(reinterpret_cast<const char*>(at_ + term * stride_), _MM_HINT_T0);
      }
    }
    if constexpr (!in_memory_order) {
      at_ += line;
    }
  }

 private:
  const T* at_;
  const T* end_;
  int64_t gap_, stride_;
};

#endif

template <int Terms, int Rows, typename T>
void add_scaled_plain(const ScaledArguments<T>& of, float (*sums)[kSumStride]) {
  for (int row = 0; row < Rows; ++row) {
    for (int term = 0; term < Terms; ++term) {
      const float x = of.x[row * of.x_stride + term];
      const T* const weight = of.weight + term * of.stride;
      for (int64_t n = 0; n < of.width; ++n) {
        sums[row][n] += x * static_cast<float>(weight[n]);
      }
    }
  }
}

#if defined(__x86_64__)

template <int Terms, int Rows, typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void add_scaled_avx512(const ScaledArguments<T>& of,
                                                                    float (*sums)[kSumStride]) {
  __m512 x[Rows][Terms];
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int term = 0; term < Terms; ++term) {
      x[row][term] = _mm512_set1_ps(of.x[row * of.x_stride + term]);
    }
  }
  Prefetch<Terms, T> prefetch(of);
  for (int64_t n = 0; n < of.width; n += 16) {
    const __mmask16 mask = first16(of.width - n);
    if (n % (64 / sizeof(T)) == 0) {
      prefetch.next();
    }
    __m512 weight[Terms];
#pragma GCC unroll 8
    for (int term = 0; term < Terms; ++term) {
      weight[term] = load16(of.weight + term * of.stride + n, mask);
    }
#pragma GCC unroll 4
    for (int row = 0; row < Rows; ++row) {
      __m512 sum = _mm512_loadu_ps(sums[row] + n);
#pragma GCC unroll 8
      for (int term = 0; term < Terms; ++term) {
        sum = _mm512_fmadd_ps(x[row][term], weight[term], sum);
      }
      _mm512_storeu_ps(sums[row] + n, sum);
    }
  }
}

template <int Terms, int Rows, typename T>
[[gnu::target("avx2,fma,f16c")]] void add_scaled_avx2(const ScaledArguments<T>& of, float (*sums)[kSumStride]) {
  __m256 x[Rows][Terms];
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int term = 0; term < Terms; ++term) {
      x[row][term] = _mm256_set1_ps(of.x[row * of.x_stride + term]);
    }
  }
  Prefetch<Terms, T> prefetch(of);
  for (int64_t n = 0; n < of.width; n += 8) {
    const int64_t left = of.width - n;
    if (n % (64 / sizeof(T)) == 0) {
      prefetch.next();
    }
    __m256 weight[Terms];
#pragma GCC unroll 8
    for (int term = 0; term < Terms; ++term) {
      const T* const from = of.weight + term * of.stride + n;
      weight[term] = left >= 8 ? load8(from) : load_first8(from, left);
    }
#pragma GCC unroll 4
    for (int row = 0; row < Rows; ++row) {
      __m256 sum = _mm256_loadu_ps(sums[row] + n);
#pragma GCC unroll 8
      for (int term = 0; term < Terms; ++term) {
        sum = _mm256_fmadd_ps(x[row][term], weight[term], sum);
      }
      _mm256_storeu_ps(sums[row] + n, sum);
    }
  }
}

#endif

// Return the sums of a thread, which its stack may have no room for.
inline float (*sums_of_thread())[kSumStride] {
  struct alignas(64) Sums {
    float rows[kRowsPerRead][kSumStride];
  };
  static thread_local const auto sums = std::make_unique_for_overwrite<Sums>();
  return sums->rows;
}

// Add rows of the weight, scaled by up to kScaledRows rows of activations, to sums, which are zero-padded to 16 columns.
template <int Terms, typename T>
void add_scaled(Simd simd, int64_t rows, const ScaledArguments<T>& of, float (*sums)[kSumStride]) {
  using Function = void (*)(const ScaledArguments<T>&, float (*)[kSumStride]);
#if defined(__x86_64__)
  static constexpr std::array<Function, kScaledRows> by_rows[] = {
      {add_scaled_plain<Terms, 1, T>, add_scaled_plain<Terms, 2, T>, add_scaled_plain<Terms, 3, T>,
       add_scaled_plain<Terms, 4, T>},
      {add_scaled_avx2<Terms, 1, T>, add_scaled_avx2<Terms, 2, T>, add_scaled_avx2<Terms, 3, T>,
       add_scaled_avx2<Terms, 4, T>},
      {add_scaled_avx512<Terms, 1, T>, add_scaled_avx512<Terms, 2, T>, add_scaled_avx512<Terms, 3, T>,
       add_scaled_avx512<Terms, 4, T>}};
#else
  static constexpr std::array<Function, kScaledRows> by_rows[] = {
      {add_scaled_plain<Terms, 1, T>, add_scaled_plain<Terms, 2, T>, add_scaled_plain<Terms, 3, T>,
       add_scaled_plain<Terms, 4, T>}};
#endif
  by_rows[static_cast<int64_t>(simd)][rows - 1](of, sums);
}

}  // namespace polycast_cpu
