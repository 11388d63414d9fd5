// Integer sums of one chunk of a weight in 4 bits, straight from its bits, for a few rows of activations.
#pragma once

#include <algorithm>
#include <cstring>

#include "int4_layout.h"
#include "isa.h"

namespace polycast_cpu {

// The most rows for one pass over the chunk.
constexpr int64_t kDirectRows = 4;

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

// How far before its use the weight is fetched, in bytes.
constexpr int64_t kInt4Ahead = 4096;

// `Rows` rows by `Parts` times 16 columns, of which the first is `16 * part`.
template <int Rows, int Parts>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512vnni")]] void int4_dots_vnni(const Int4Arguments& of, int part,
                                                                             int32_t (*sums)[kBlock]) {
  const __m512i low_half = _mm512_set1_epi8(15);
  __m512i sum[Rows][Parts];
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int each = 0; each < Parts; ++each) {
      sum[row][each] = _mm512_setzero_si512();
    }
  }
  const uint8_t* at = of.chunk + Int4Weight::kScaleBytes;
  const int8_t* x = of.x;
  for (int64_t first = 0, number = 0; first < of.count; first += of.group, ++number) {
    const uint8_t* const multipliers = at + 16 * part;
    at += Int4Weight::kMultiplierBytes;
    __m512i of_group[Rows][Parts];
#pragma GCC unroll 4
    for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
      for (int each = 0; each < Parts; ++each) {
        of_group[row][each] = _mm512_set1_epi32(of.offsets[row * of.offset_stride + number]);
      }
    }
    for (int64_t step = Groups::eights(std::min(of.group, of.count - first)); step > 0; --step) {
#pragma GCC unroll 4
      for (int each = 0; each < Parts; ++each) {
        const uint8_t* const bytes = at + 64 * (part + each);
        if constexpr (Rows == 1) {
          _mm_prefetch(reinterpret_cast<const char*>(bytes) + kInt4Ahead, _MM_HINT_T0);
        }
        const __m512i both = _mm512_loadu_si512(bytes);
        const __m512i low = _mm512_and_si512(both, low_half);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
#pragma GCC unroll 4
        for (int row = 0; row < Rows; ++row) {
          int32_t four[2];
          std::memcpy(four, x + row * of.x_stride, sizeof four);
          of_group[row][each] = _mm512_dpbusd_epi32(of_group[row][each], low, _mm512_set1_epi32(four[0]));
          of_group[row][each] = _mm512_dpbusd_epi32(of_group[row][each], high, _mm512_set1_epi32(four[1]));
        }
      }
      at += Int4Weight::kStepBytes;
      x += Groups::kEight;
    }
#pragma GCC unroll 4
    for (int each = 0; each < Parts; ++each) {
      const __m512i multiplier =
          _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(multipliers + 16 * each)));
#pragma GCC unroll 4
      for (int row = 0; row < Rows; ++row) {
        sum[row][each] = _mm512_add_epi32(sum[row][each], _mm512_mullo_epi32(of_group[row][each], multiplier));
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int each = 0; each < Parts; ++each) {
      _mm512_storeu_si512(sums[row] + 16 * (part + each), sum[row][each]);
    }
  }
}

// All columns at once, or half of them twice where registers would not suffice.
template <int Rows>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512vnni")]] void int4_dots_vnni(const Int4Arguments& of,
                                                                             int32_t (*sums)[kBlock]) {
  constexpr int parts = Rows <= 2 ? 4 : 2;
  for (int part = 0; part < 4; part += parts) {
    int4_dots_vnni<Rows, parts>(of, part, sums);
  }
}

#endif

}  // namespace polycast_cpu
