// Sums of products of some rows of activations and a block of a weight in 4 bits. Sums of a chunk are integers, either straight from
// 4 bits or by the product of 8 bits, and are exact; sums of chunks are made in float32, in their order.
#pragma once

#include <cmath>

#include "int4_activations.h"
#include "int4_dots_avx2.h"
#include "int4_dots_neon.h"
#include "int4_many_rows.h"
#include "int4_unpack.h"
#include "product.h"
#include "simd.h"

namespace polycast_cpu {

// Rows of sums of a block.
using FloatSums = float (*)[kBlock];

#if defined(__x86_64__)

// The functions by number of rows.
template <bool Prefetches>
constexpr Int4Dots int4_dots_by_rows[kDirectRowsAvx512] = {
    int4_dots_vnni<1, 4, Prefetches>, int4_dots_vnni<2, 4, Prefetches>, int4_dots_vnni<3, 4, Prefetches>,
    int4_dots_vnni<4, 4, Prefetches>, int4_dots_vnni<5, 4, Prefetches>, int4_dots_vnni<6, 4, Prefetches>,
    int4_dots_vnni<7, 2, Prefetches>, int4_dots_vnni<8, 2, Prefetches>};

#endif

// Return the function for a number of rows.
inline Int4Dots int4_dots_for(Isa isa, int64_t rows) {
#if defined(__x86_64__)
  static constexpr Int4Dots avx2[kDirectRowsAvx2] = {int4_dots_avx2<1>, int4_dots_avx2<2>};
  if (has_avx512(isa)) {  // AMD's prefetcher is fast enough for what three rows read
    return (prefetcher_crosses_pages() && rows <= 3 ? int4_dots_by_rows<false> : int4_dots_by_rows<true>)[rows - 1];
  }
  if (has_avx2(isa)) {
    return avx2[rows - 1];
  }
#elif defined(__aarch64__)
  static constexpr Int4Dots neon[kDirectRows] = {int4_dots_neon<1>, int4_dots_neon<2>, int4_dots_neon<3>};
  if (has_dotprod(isa)) {
    return neon[rows - 1];
  }
#endif
  static constexpr Int4Dots plain[kDirectRows] = {int4_dots_plain<1>, int4_dots_plain<2>, int4_dots_plain<3>};
  return plain[rows - 1];
}

// Sums of a chunk for some rows: integers, less the offsets of a weight in 8 bits if there are some.
struct ChunkSums {
  const int32_t (*sums)[kBlock];
  const int32_t* offsets;
  int64_t rows;
  const uint8_t* chunk;
  const float* scales;  // of the rows
  int64_t scale_stride;
};

inline void add_chunk_plain(const ChunkSums& of, FloatSums totals) {
  for (int64_t row = 0; row < of.rows; ++row) {
    for (int64_t lane = 0; lane < kBlock; ++lane) {
      const int32_t sum = of.sums[row][lane] - (of.offsets == nullptr ? 0 : of.offsets[lane]);
      const float of_column = static_cast<float>(sum) * Int4Weight::scale(of.chunk, lane);
      totals[row][lane] = std::fma(of_column, of.scales[row * of.scale_stride], totals[row][lane]);
    }
  }
}

#if defined(__x86_64__)

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline void add_chunk_avx512(const ChunkSums& of, FloatSums totals) {
  __m512 scales[4];
  __m512i offsets[4];
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part) {
    scales[part] = load16(reinterpret_cast<const at::BFloat16*>(of.chunk) + 16 * part, 0xffff);
    offsets[part] =
        of.offsets == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(of.offsets + 16 * part);
  }
  for (int64_t row = 0; row < of.rows; ++row) {
    const __m512 of_row = _mm512_set1_ps(of.scales[row * of.scale_stride]);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __m512i sum = _mm512_sub_epi32(_mm512_loadu_si512(of.sums[row] + 16 * part), offsets[part]);
      const __m512 of_columns = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales[part]);
      float* const total = totals[row] + 16 * part;
      _mm512_storeu_ps(total, _mm512_fmadd_ps(of_columns, of_row, _mm512_loadu_ps(total)));
    }
  }
}

[[gnu::target("avx2,fma")]] inline void add_chunk_avx2(const ChunkSums& of, FloatSums totals) {
  for (int lane = 0; lane < kBlock; lane += 8) {
    const __m256i bits =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(of.chunk + 2 * lane)));
    const __m256 scales = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    const __m256i offsets = of.offsets == nullptr ? _mm256_setzero_si256() : load32(of.offsets + lane);
    for (int64_t row = 0; row < of.rows; ++row) {
      const __m256 of_columns =
          _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(load32(of.sums[row] + lane), offsets)), scales);
      const __m256 of_row = _mm256_set1_ps(of.scales[row * of.scale_stride]);
      float* const total = totals[row] + lane;
      _mm256_storeu_ps(total, _mm256_fmadd_ps(of_columns, of_row, _mm256_loadu_ps(total)));
    }
  }
}

#elif defined(__aarch64__)

inline void add_chunk_neon(const ChunkSums& of, FloatSums totals) {
  for (int lane = 0; lane < kBlock; lane += 4) {
    uint16_t bits[4];
    std::memcpy(bits, of.chunk + 2 * lane, sizeof bits);
    const float32x4_t scales = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(bits), 16));
    const int32x4_t offsets = of.offsets == nullptr ? vdupq_n_s32(0) : vld1q_s32(of.offsets + lane);
    for (int64_t row = 0; row < of.rows; ++row) {
      const int32x4_t sum = vsubq_s32(vld1q_s32(of.sums[row] + lane), offsets);
      const float32x4_t of_columns = vmulq_f32(vcvtq_f32_s32(sum), scales);
      float* const total = totals[row] + lane;
      vst1q_f32(total, vfmaq_n_f32(vld1q_f32(total), of_columns, of.scales[row * of.scale_stride]));
    }
  }
}

#endif

// Add the sums of a chunk to the totals of its rows.
inline void add_chunk(Isa isa, const ChunkSums& of, FloatSums totals) {
#if defined(__x86_64__)
  if (has_avx512(isa)) {
    return add_chunk_avx512(of, totals);
  }
  if (has_avx2(isa)) {
    return add_chunk_avx2(of, totals);
  }
#elif defined(__aarch64__)
  if (has_dotprod(isa)) {
    return add_chunk_neon(of, totals);
  }
#endif
  add_chunk_plain(of, totals);
}

// Sums for rows [first, last) straight from 4 bits.
inline void multiply_directly(Isa isa, const ChunkedActivations& x, int64_t first, int64_t last,
                              const Int4Weight& weight, int64_t block, FloatSums totals) {
  alignas(64) int32_t sums[kDirectRowsAvx512][kBlock];
  const int64_t most = has_avx512(isa) ? kDirectRowsAvx512 : has_avx2(isa) ? kDirectRowsAvx2 : kDirectRows;
  const Groups& groups = weight.groups;
  const uint8_t* chunk = weight.block(block);
  for (int64_t number = 0; number < x.chunks; ++number) {
    const int64_t count = groups.terms_of_chunk(number);
    for (int64_t row = first, rows; row < last; row += rows) {
      // Nine rows are five and four, not eight and one.
      const int64_t left = last - row, turns = (left + most - 1) / most;
      rows = (left + turns - 1) / turns;
      const Int4Arguments of{chunk,
                             reinterpret_cast<const int8_t*>(x.row(row)) + number * groups.chunk,
                             x.stride,
                             x.offsets + row * x.groups + number * groups.groups_in_chunk(),
                             x.groups,
                             count,
                             groups.group};
      int4_dots_for(isa, rows)(of, sums);
      add_chunk(isa, {sums, nullptr, rows, chunk, x.scales + row * x.chunks + number, x.chunks}, totals + row - first);
    }
    chunk += Int4Weight::chunk_bytes(groups, count);
  }
}

// Add the products of rows [first, last) and the unpacked chunk of a number to totals.
inline void add_unpacked(Isa isa, const ChunkedActivations& x, int64_t first, int64_t last, const UnpackedChunk& unpacked,
                         const uint8_t* chunk, int64_t number, const Groups& groups, FloatSums totals) {
  const int64_t count = groups.terms_of_chunk(number), padded = Groups::padded(count);
  const Activations part{x.values + number * groups.chunk, x.scales + number, x.rows, x.stride};
#if defined(__x86_64__)
  if (isa == Isa::vnni) {
    const int64_t bytes = Int4Weight::chunk_bytes(groups, count);
    return add_unpacked_vnni({part.values + first * x.stride, x.stride, unpacked.values, padded / 4, unpacked.offsets,
                              unpacked.scales, part.scales + first * x.chunks, x.chunks},
                             last - first, chunk + bytes, bytes, totals);
  }
#endif
  const Weight weight{unpacked.values, nullptr, unpacked.offsets, kBlock, padded};
  alignas(64) int32_t sums[kMaxRows][kBlock];
  for (int64_t row = first; row < last; row += kMaxRows) {
    const int64_t rows = std::min(kMaxRows, last - row);
    multiply(isa, part, row, rows, weight, 0, sums);
    add_chunk(isa, {sums, unpacked.offsets, rows, chunk, part.scales + row * x.chunks, x.chunks}, totals + row - first);
  }
}

// Sums for rows [first, last) by the product of 8 bits.
inline void multiply_unpacked(Isa isa, const ChunkedActivations& x, int64_t first, int64_t last,
                              const Int4Weight& weight, int64_t block, FloatSums totals) {
  UnpackedChunk unpacked;
  const Groups& groups = weight.groups;
  const uint8_t* chunk = weight.block(block);
  for (int64_t number = 0; number < x.chunks; ++number) {
    const int64_t count = groups.terms_of_chunk(number);
    unpack(isa, chunk, count, groups.group, unpacked);
    add_unpacked(isa, x, first, last, unpacked, chunk, number, groups, totals);
    chunk += Int4Weight::chunk_bytes(groups, count);
  }
}

// Return whether so many rows are multiplied straight from 4 bits.
inline bool is_direct(Isa isa, int64_t rows, const Groups& groups) {
  return rows <= (isa == Isa::vnni ? kMaxDirectVnni : kMaxDirect) || groups.chunk > kMaxUnpacked;
}

}  // namespace polycast_cpu
