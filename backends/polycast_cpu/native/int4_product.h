// The product of quantized activations and a weight in 4 bits, on all threads. Sums of a chunk are integers, either straight from 4
// bits or by the product of 8 bits, and are exact; sums of chunks are made in float32, in their order. So neither the number of rows
// nor that of threads nor the instructions change a bit.
#pragma once

#include <cmath>
#include <optional>

#include "int4_activations.h"
#include "int4_dots_avx2.h"
#include "int4_unpack.h"
#include "product.h"
#include "simd.h"

namespace polycast_cpu {

// More rows are multiplied in 8 bits.
constexpr int64_t kMostDirect = 8;

// Rows of sums of a block.
using FloatSums = float (*)[kBlock];

inline Simd simd_of(Isa isa) {
  return has_avx512(isa) ? Simd::avx512 : has_avx2(isa) ? Simd::avx2 : Simd::plain;
}

// Return the function for a number of rows.
inline Int4Dots int4_dots_for(Isa isa, int64_t rows) {
#if defined(__x86_64__)
  static constexpr Int4Dots vnni[kDirectRows] = {int4_dots_vnni<1>, int4_dots_vnni<2>, int4_dots_vnni<3>,
                                                 int4_dots_vnni<4>};
  static constexpr Int4Dots avx2[kDirectRows] = {int4_dots_avx2<1>, int4_dots_avx2<2>, int4_dots_avx2<3>,
                                                 int4_dots_avx2<4>};
  if (has_avx512(isa)) {
    return vnni[rows - 1];
  }
  if (has_avx2(isa)) {
    return avx2[rows - 1];
  }
#endif
  static constexpr Int4Dots plain[kDirectRows] = {int4_dots_plain<1>, int4_dots_plain<2>, int4_dots_plain<3>,
                                                  int4_dots_plain<4>};
  return plain[rows - 1];
}

inline void add_chunk_plain(const int32_t* sums, const int32_t* offsets, const uint8_t* chunk, float scale,
                            float* total) {
  for (int64_t lane = 0; lane < kBlock; ++lane) {
    const int32_t sum = offsets == nullptr ? sums[lane] : sums[lane] - offsets[lane];
    total[lane] = std::fma(static_cast<float>(sum) * Int4Weight::scale(chunk, lane), scale, total[lane]);
  }
}

#if defined(__x86_64__)

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline void add_chunk_avx512(const int32_t* sums, const int32_t* offsets,
                                                                          const uint8_t* chunk, float scale,
                                                                          float* total) {
  const __m512 of_row = _mm512_set1_ps(scale);
#pragma GCC unroll 4
  for (int lane = 0; lane < kBlock; lane += 16) {
    const __m512 scales = load16(reinterpret_cast<const at::BFloat16*>(chunk) + lane, 0xffff);
    __m512i sum = _mm512_loadu_si512(sums + lane);
    if (offsets != nullptr) {
      sum = _mm512_sub_epi32(sum, _mm512_loadu_si512(offsets + lane));
    }
    const __m512 of_columns = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales);
    _mm512_storeu_ps(total + lane, _mm512_fmadd_ps(of_columns, of_row, _mm512_loadu_ps(total + lane)));
  }
}

[[gnu::target("avx2,fma")]] inline void add_chunk_avx2(const int32_t* sums, const int32_t* offsets,
                                                       const uint8_t* chunk, float scale, float* total) {
  const __m256 of_row = _mm256_set1_ps(scale);
  for (int lane = 0; lane < kBlock; lane += 8) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk + 2 * lane)));
    const __m256 scales = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    __m256i sum = load32(sums + lane);
    if (offsets != nullptr) {
      sum = _mm256_sub_epi32(sum, load32(offsets + lane));
    }
    const __m256 of_columns = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scales);
    _mm256_storeu_ps(total + lane, _mm256_fmadd_ps(of_columns, of_row, _mm256_loadu_ps(total + lane)));
  }
}

#endif

// Add the sums of a chunk to the total of a row. `offsets` are those of a weight in 8 bits.
inline void add_chunk(Isa isa, const int32_t* sums, const int32_t* offsets, const uint8_t* chunk, float scale,
                      float* total) {
#if defined(__x86_64__)
  if (has_avx512(isa)) {
    return add_chunk_avx512(sums, offsets, chunk, scale, total);
  }
  if (has_avx2(isa)) {
    return add_chunk_avx2(sums, offsets, chunk, scale, total);
  }
#endif
  add_chunk_plain(sums, offsets, chunk, scale, total);
}

// Sums for rows [first, last) straight from 4 bits.
inline void multiply_directly(Isa isa, const ChunkedActivations& x, int64_t first, int64_t last,
                              const Int4Weight& weight, int64_t block, FloatSums totals) {
  alignas(64) int32_t sums[kDirectRows][kBlock];
  const Groups& groups = weight.groups;
  const uint8_t* chunk = weight.block(block);
  for (int64_t number = 0; number < x.chunks; ++number) {
    const int64_t count = groups.terms_of_chunk(number);
    for (int64_t row = first; row < last; row += kDirectRows) {
      const int64_t rows = std::min(kDirectRows, last - row);
      const Int4Arguments of{chunk,
                             reinterpret_cast<const int8_t*>(x.row(row)) + number * groups.chunk,
                             x.stride,
                             x.offsets + row * x.groups + number * groups.groups_in_chunk(),
                             x.groups,
                             count,
                             groups.group};
      int4_dots_for(isa, rows)(of, sums);
      for (int64_t i = 0; i < rows; ++i) {
        add_chunk(isa, sums[i], nullptr, chunk, x.scales[(row + i) * x.chunks + number], totals[row - first + i]);
      }
    }
    chunk += Int4Weight::chunk_bytes(groups, count);
  }
}

// Sums for rows [first, last) by the product of 8 bits.
inline void multiply_unpacked(Isa isa, const ChunkedActivations& x, int64_t first, int64_t last,
                              const Int4Weight& weight, int64_t block, FloatSums totals) {
  alignas(64) int32_t sums[kMostRows][kBlock];
  UnpackedChunk unpacked;
  const Groups& groups = weight.groups;
  const uint8_t* chunk = weight.block(block);
  for (int64_t number = 0; number < x.chunks; ++number) {
    const int64_t count = groups.terms_of_chunk(number);
    unpack(isa, chunk, count, groups.group, unpacked);
    const Activations part{x.values + number * groups.chunk, nullptr, x.rows, x.stride};
    const Weight of_chunk{unpacked.values, nullptr, unpacked.offsets, kBlock, Groups::padded(count)};
    for (int64_t row = first; row < last; row += kMostRows) {
      const int64_t rows = std::min(kMostRows, last - row);
      multiply(isa, part, row, rows, of_chunk, 0, sums);
      for (int64_t i = 0; i < rows; ++i) {
        add_chunk(isa, sums[i], unpacked.offsets, chunk, x.scales[(row + i) * x.chunks + number],
                  totals[row - first + i]);
      }
    }
    chunk += Int4Weight::chunk_bytes(groups, count);
  }
}

// Return whether so many rows are multiplied straight from 4 bits.
inline bool is_direct(int64_t rows, const Groups& groups) {
  return rows <= kMostDirect || groups.chunk > kMostUnpacked;
}

template <typename T>
void int4_product(Isa isa, const ChunkedActivations& x, const Int4Weight& weight, const Bias& bias, T* out) {
  const bool direct = is_direct(x.rows, weight.groups);
  const int64_t in_a_row = blocks(weight.columns), turns = (x.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  for_each_part(turns * in_a_row, grain(Int4Weight::block_bytes(weight.groups)), [&](int64_t begin, int64_t end) {
#if defined(__x86_64__)
    std::optional<Tiles> tiles;
    if (isa == Isa::amx && !direct) {
      tiles.emplace();
    }
#endif
    alignas(64) float totals[kRowsAtOnce][kBlock];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task % in_a_row;
      const int64_t first = task / in_a_row * kRowsAtOnce, last = std::min(x.rows, first + kRowsAtOnce);
      std::fill_n(totals[0], (last - first) * kBlock, 0.0f);
      direct ? multiply_directly(isa, x, first, last, weight, block, totals)
             : multiply_unpacked(isa, x, first, last, weight, block, totals);
      for (int64_t row = first; row < last; ++row) {
        const int64_t column = block * kBlock;
        finish(simd_of(isa), totals[row - first], 1, bias.row(row) == nullptr ? nullptr : bias.row(row) + column,
               std::min(kBlock, weight.columns - column), out + row * weight.columns + column);
      }
    }
  });
}

}  // namespace polycast_cpu
