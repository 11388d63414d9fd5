// Integer sums of one chunk of a weight in 4 bits, straight from its bits, for a few rows of activations.
#pragma once

#include <algorithm>
#include <cstring>

#include "int4_layout.h"
#include "isa.h"

namespace polycast_cpu {

// The most rows for one pass over the chunk.
constexpr int64_t kDirectRows = 3;

// `count` terms of rows of activations, in signed bytes, zero-padded to eights.
struct Int4Arguments {
  const uint8_t* chunk;
  const int8_t* x;
  int64_t x_stride;
  const int32_t* offsets;  // of each row and group, due to the zero of the levels
  int64_t offset_stride;
  int64_t count, group;
};

using Int4Dots = void (*)(const Int4Arguments&, int32_t (*sums)[kBlock]);

template <int Rows>
void int4_dots_plain(const Int4Arguments& of, int32_t (*sums)[kBlock]) {
  const uint8_t* group = of.chunk + Int4Weight::kScaleBytes;
  for (int row = 0; row < Rows; ++row) {
    std::fill_n(sums[row], kBlock, 0);
  }
  for (int64_t first = 0, number = 0; first < of.count; first += of.group, ++number) {
    const int64_t size = std::min(of.group, of.count - first);
    for (int row = 0; row < Rows; ++row) {
      const int8_t* const x = of.x + row * of.x_stride + first;
      for (int64_t lane = 0; lane < kBlock; ++lane) {
        int32_t sum = of.offsets[row * of.offset_stride + number];
        for (int64_t k = 0; k < size; ++k) {
          const uint8_t byte = group[Int4Weight::kMultiplierBytes + k / 8 * Int4Weight::kStepBytes + lane * 4 + k % 4];
          sum += (k % 8 < 4 ? byte & 15 : byte >> 4) * x[k];
        }
        sums[row][lane] += sum * static_cast<int8_t>(group[lane]);
      }
    }
    group += Int4Weight::group_bytes(size);
  }
}

#if defined(__x86_64__)

// Distance, in bytes, by which the weight is fetched ahead of its use.
constexpr int64_t kInt4Ahead = 4096;

// Repeat four terms. Read as a whole, from memory: eight terms would be split in general registers, which is slow.
[[gnu::target("avx512f")]] inline __m512i repeat_four_avx512(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

// Sums of a group are in registers, those of the chunk in the cache: 16 columns by 16.
template <int Rows, bool Prefetches>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512vnni")]] void int4_dots_vnni(const Int4Arguments& of,
                                                                             int32_t (*sums)[kBlock]) {
  const __m512i low_half = _mm512_set1_epi8(15);
  const uint8_t* at = of.chunk + Int4Weight::kScaleBytes;
  const int8_t* x = of.x;
  const int32_t* offsets = of.offsets;
  std::fill_n(sums[0], Rows * kBlock, 0);
  for (int64_t first = 0; first < of.count; first += of.group, ++offsets) {
    const uint8_t* const multipliers = at;
    at += Int4Weight::kMultiplierBytes;
    __m512i of_group[Rows][4];
#pragma GCC unroll 4
    for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        of_group[row][part] = _mm512_set1_epi32(offsets[row * of.offset_stride]);
      }
    }
    for (int64_t step = Groups::eights(std::min(of.group, of.count - first)); step > 0; --step) {
      __m512i first_four[Rows], last_four[Rows];
#pragma GCC unroll 4
      for (int row = 0; row < Rows; ++row) {
        first_four[row] = repeat_four_avx512(x + row * of.x_stride);
        last_four[row] = repeat_four_avx512(x + row * of.x_stride + 4);
      }
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        if constexpr (Prefetches) {
          _mm_prefetch(reinterpret_cast<const char*>(at) + kInt4Ahead + 64 * part, _MM_HINT_T0);
        }
        const __m512i both = _mm512_loadu_si512(at + 64 * part);
        const __m512i low = _mm512_and_si512(both, low_half);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
#pragma GCC unroll 4
        for (int row = 0; row < Rows; ++row) {
          of_group[row][part] = _mm512_dpbusd_epi32(of_group[row][part], low, first_four[row]);
          of_group[row][part] = _mm512_dpbusd_epi32(of_group[row][part], high, last_four[row]);
        }
      }
      at += Int4Weight::kStepBytes;
      x += Groups::kEight;
    }
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __m512i multiplier =
          _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(multipliers + 16 * part)));
#pragma GCC unroll 4
      for (int row = 0; row < Rows; ++row) {
        int32_t* const to = sums[row] + 16 * part;
        const __m512i product = _mm512_mullo_epi32(of_group[row][part], multiplier);
        _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_loadu_si512(to), product));
      }
    }
  }
}

#endif

}  // namespace polycast_cpu
