// Integer sums of one chunk of a weight in 4 bits, straight from its bits, for a few rows of activations.
#pragma once

#include <algorithm>
#include <cstring>

#include "int4_layout.h"
#include "isa.h"

namespace polycast_cpu {

// The most rows for one pass over the chunk.
constexpr int64_t kDirectRows = 3, kDirectRowsAvx2 = 2, kDirectRowsAvx512 = 8;

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

// Sums of a group are in registers, for 16 * `Parts` of the columns at a time, and those of the chunk in the cache.
template <int Rows, int Parts, bool Prefetches>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512vnni")]] void int4_dots_vnni(const Int4Arguments& of,
                                                                             int32_t (*sums)[kBlock]) {
  const __m512i low_half = _mm512_set1_epi8(15);
  const uint8_t* group = of.chunk + Int4Weight::kScaleBytes;
  const int32_t* offsets = of.offsets;
  for (int64_t first = 0; first < of.count; first += of.group, ++offsets) {
    const int64_t steps = Groups::eights(std::min(of.group, of.count - first));
    for (int begin = 0; begin < 4; begin += Parts) {
      __m512i of_group[Rows][Parts];
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
        for (int part = 0; part < Parts; ++part) {
          of_group[row][part] = _mm512_set1_epi32(offsets[row * of.offset_stride]);
        }
      }
      const uint8_t* at = group + Int4Weight::kMultiplierBytes + 64 * begin;
      const int8_t* x = of.x + first;
      for (int64_t step = 0; step < steps; ++step, at += Int4Weight::kStepBytes, x += Groups::kEight) {
        if constexpr (Prefetches) {
#pragma GCC unroll 4
          for (int part = 0; part < Parts; ++part) {
            _mm_prefetch(reinterpret_cast<const char*>(at) + kInt4Ahead + 64 * part, _MM_HINT_T0);
          }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          __m512i levels[Parts];
#pragma GCC unroll 4
          for (int part = 0; part < Parts; ++part) {
            const __m512i both = _mm512_loadu_si512(at + 64 * part);
            levels[part] = _mm512_and_si512(half == 0 ? both : _mm512_srli_epi16(both, 4), low_half);
          }
#pragma GCC unroll 8
          for (int row = 0; row < Rows; ++row) {
            const __m512i four = repeat_four_avx512(x + row * of.x_stride + 4 * half);
#pragma GCC unroll 4
            for (int part = 0; part < Parts; ++part) {
              of_group[row][part] = _mm512_dpbusd_epi32(of_group[row][part], levels[part], four);
            }
          }
        }
      }
#pragma GCC unroll 4
      for (int part = 0; part < Parts; ++part) {
        const int column = 16 * (begin + part);
        const __m512i multiplier =
            _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group + column)));
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row) {
          int32_t* const to = sums[row] + column;
          const __m512i before = first == 0 ? _mm512_setzero_si512() : _mm512_loadu_si512(to);
          _mm512_storeu_si512(to, _mm512_add_epi32(before, _mm512_mullo_epi32(of_group[row][part], multiplier)));
        }
      }
    }
    group += Int4Weight::kMultiplierBytes + steps * Int4Weight::kStepBytes;
  }
}

#endif

}  // namespace polycast_cpu
