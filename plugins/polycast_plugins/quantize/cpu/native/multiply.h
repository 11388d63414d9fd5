// Integer products of up to kMaxRows rows of activations and one block of columns.
#pragma once

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "layout.h"

namespace polycast_cpu {

constexpr int64_t kMaxRows = 32;

// The rows in memory that AMX tiles read.
constexpr int64_t tiled(int64_t rows) {
  return (rows + kMaxRows - 1) / kMaxRows * kMaxRows;
}

inline void multiply_plain(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* block, int64_t terms,
                           int32_t (*sums)[kBlock]) {
  for (int64_t row = 0; row < count; ++row) {
    std::fill_n(sums[row], kBlock, 0);
    for (int64_t k = 0; k < terms; ++k) {
      const int8_t* four = block + k / 4 * 4 * kBlock + k % 4;
      for (int64_t column = 0; column < kBlock; ++column) {
        sums[row][column] += rows[row * stride + k] * four[4 * column];
      }
    }
  }
}

#if defined(__x86_64__)

// `Rows` rows by 64 columns: all sums are in registers, and each load of the weight serves all rows. For each four terms, `Lines` cache
// lines are prefetched: four that are used soon into the L1 cache (`PastCaches`: the others need not keep them), or fewer into the L2
// cache.
template <int Rows, int Lines, bool PastCaches>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512vnni")]] void multiply_rows_vnni(const uint8_t* rows, int64_t stride,
                                                                                 const int8_t* block, int64_t fours,
                                                                                 const int8_t* ahead, int32_t (*sums)[kBlock]) {
  __m512i sum[Rows][4];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int part = 0; part < 4; ++part) {
      sum[row][part] = _mm512_setzero_si512();
    }
  }
  for (int64_t four = 0; four < fours; ++four, block += 4 * kBlock) {
    __m512i weight[4];
#pragma GCC unroll 8
    for (int part = 0; part < 4; ++part) {
      weight[part] = _mm512_loadu_si512(block + 64 * part);
    }
#pragma GCC unroll 4
    for (int line = 0; line < Lines; ++line, ahead += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead), Lines < 4 ? _MM_HINT_T1 : PastCaches ? _MM_HINT_NTA : _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      int32_t values;
      std::memcpy(&values, rows + row * stride + 4 * four, 4);
      const __m512i activations = _mm512_set1_epi32(values);
#pragma GCC unroll 8
      for (int part = 0; part < 4; ++part) {
        sum[row][part] = _mm512_dpbusd_epi32(sum[row][part], activations, weight[part]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int part = 0; part < 4; ++part) {
      _mm512_storeu_si512(sums[row] + 16 * part, sum[row][part]);
    }
  }
}

constexpr int64_t kMostRowsVnni = 6;

// The functions by number of rows.
template <int Lines, bool PastCaches = false>
constexpr void (*multiply_vnni_by_rows[kMostRowsVnni])(const uint8_t*, int64_t, const int8_t*, int64_t, const int8_t*,
                                                       int32_t (*)[kBlock]) = {
    multiply_rows_vnni<1, Lines, PastCaches>, multiply_rows_vnni<2, Lines, PastCaches>, multiply_rows_vnni<3, Lines, PastCaches>,
    multiply_rows_vnni<4, Lines, PastCaches>, multiply_rows_vnni<5, Lines, PastCaches>, multiply_rows_vnni<6, Lines, PastCaches>};

// A weight of so many bytes is read from memory at each call: a model has several like it.
constexpr int64_t kStreamed = int64_t{1} << 23;

inline void multiply_vnni(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* block, int64_t terms,
                          int64_t bytes_of_weight, int32_t (*sums)[kBlock]) {
  const int64_t fours = (terms + 3) / 4, turns = (count + kMostRowsVnni - 1) / kMostRowsVnni;
  // A weight that few rows read from memory is prefetched, since many processors fetch it too late by themselves. AMD's do not; but there a
  // large weight is read past the caches, to leave in them what the other ops of a model need. For more rows, the first turns fetch the
  // next block, since processors prefetch nothing while the block is read again.
  const bool is_amd = prefetcher_crosses_pages(), past_caches = is_amd && count <= 3 && bytes_of_weight >= kStreamed;
  const int lines = turns > 3 ? 1 : turns > 1 ? 2 : past_caches || (!is_amd && count <= 4) ? 4 : 0;
  const int8_t* ahead = block + (turns == 1 ? 2048 : blocks(terms) * kBlock * kBlock);
  for (int64_t turn = 0; turn < turns; ++turn) {
    // Seven rows are four and three, not six and one.
    const int64_t left = turns - turn, now = (count + left - 1) / left;
    const bool fetches = lines * turn < 4;
    const auto& by_rows = !fetches || lines == 0 ? multiply_vnni_by_rows<0>
                          : lines == 1           ? multiply_vnni_by_rows<1>
                          : lines == 2           ? multiply_vnni_by_rows<2>
                          : past_caches          ? multiply_vnni_by_rows<4, true>
                                                 : multiply_vnni_by_rows<4>;
    by_rows[now - 1](rows, stride, block, fours, ahead, sums);
    rows += now * stride;
    sums += now;
    count -= now;
    ahead += fours * 64 * lines;
  }
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Eight tiles of 16 rows by 64 bytes. Not a local variable: gcc's _tile_loadconfig declares that it reads only eight bytes.
inline const TileConfig whole_tiles;

// Configures the tiles of this thread; releases them on destruction.
class Tiles {
 public:
  [[gnu::target("amx-tile")]] Tiles() {
    _tile_loadconfig(&whole_tiles);
  }
  [[gnu::target("amx-tile")]] ~Tiles() {
    _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// 16 rows by 64 columns.
[[gnu::target("amx-tile,amx-int8")]] inline void multiply_16_amx(const uint8_t* rows, int64_t stride,
                                                                 const int8_t* block, int64_t terms,
                                                                 int32_t (*sums)[kBlock]) {
  constexpr int step = 4 * kBlock, line = sizeof(*sums);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < terms; k += kBlock, rows += kBlock, block += kBlock * kBlock) {
    _tile_loadd(4, rows, stride);
    _tile_loadd(5, block, step);
    _tile_dpbusd(0, 4, 5);
    _tile_loadd(6, block + 64, step);
    _tile_dpbusd(1, 4, 6);
    _tile_loadd(7, block + 128, step);
    _tile_dpbusd(2, 4, 7);
    _tile_loadd(5, block + 192, step);
    _tile_dpbusd(3, 4, 5);
  }
  _tile_stored(0, sums[0], line);
  _tile_stored(1, sums[0] + 16, line);
  _tile_stored(2, sums[0] + 32, line);
  _tile_stored(3, sums[0] + 48, line);
}

// 32 rows by 32 columns.
[[gnu::target("amx-tile,amx-int8")]] inline void multiply_32_amx(const uint8_t* rows, int64_t stride,
                                                                 const int8_t* block, int64_t terms, int32_t* sums) {
  constexpr int step = 4 * kBlock, line = kBlock * sizeof(*sums);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < terms; k += kBlock, rows += kBlock, block += kBlock * kBlock) {
    _tile_loadd(4, rows, stride);
    _tile_loadd(6, block, step);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, block + 64, step);
    _tile_dpbusd(1, 4, 7);
    _tile_loadd(5, rows + 16 * stride, stride);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_stored(0, sums, line);
  _tile_stored(1, sums + 16, line);
  _tile_stored(2, sums + 16 * kBlock, line);
  _tile_stored(3, sums + 16 * kBlock + 16, line);
}

// Always reads 16 or 32 rows.
inline void multiply_amx(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* block, int64_t terms,
                         int32_t (*sums)[kBlock]) {
  if (count <= 16) {
    return multiply_16_amx(rows, stride, block, terms, sums);
  }
  multiply_32_amx(rows, stride, block, terms, sums[0]);
  multiply_32_amx(rows, stride, block + 128, terms, sums[0] + 32);
}

#endif

}  // namespace polycast_cpu
