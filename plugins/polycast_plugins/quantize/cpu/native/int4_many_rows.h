// Products of many rows of activations by a chunk of a weight in 4 bits that was unpacked to 8 bits. Sums are scaled and added to the
// totals while they are in registers.
#pragma once

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "layout.h"

namespace polycast_cpu {

// Some rows of activations and an unpacked chunk.
struct UnpackedArguments {
  const uint8_t* rows;
  int64_t stride;
  const int8_t* values;
  int64_t fours;
  const int32_t* offsets;  // of each column
  const float* scales;     // of each column
  const float* row_scales;
  int64_t scale_stride;
};

// Fetches memory ahead of its use, in parts.
class LinesAhead {
 public:
  LinesAhead(const uint8_t* begin, int64_t bytes, int64_t parts)
      : at_(begin), end_(begin + bytes), part_((bytes / parts / kLine + 1) * kLine) {}

  // Fetch one part.
  void fetch() {
    for (const uint8_t* const until = std::min(end_, at_ + part_); at_ < until; at_ += kLine) {
      __builtin_prefetch(at_);
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  const uint8_t *at_, *end_;
  int64_t part_;
};

#if defined(__x86_64__)

template <int Rows>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512vnni")]] void add_unpacked_vnni(const UnpackedArguments& of,
                                                                                float (*totals)[kBlock]) {
  __m512i sum[Rows][4];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      sum[row][part] = _mm512_setzero_si512();
    }
  }
  const int8_t* values = of.values;
  for (int64_t four = 0; four < of.fours; ++four, values += 4 * kBlock) {
    __m512i weight[4];
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      weight[part] = _mm512_loadu_si512(values + 64 * part);
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      int32_t terms;
      std::memcpy(&terms, of.rows + row * of.stride + 4 * four, sizeof terms);
      const __m512i activations = _mm512_set1_epi32(terms);
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        sum[row][part] = _mm512_dpbusd_epi32(sum[row][part], activations, weight[part]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      asm volatile("" : "+v"(sum[row][part]));  // or gcc scales sums within the loop, and has too few registers
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    const __m512 of_row = _mm512_set1_ps(of.row_scales[row * of.scale_stride]);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __m512i exact = _mm512_sub_epi32(sum[row][part], _mm512_loadu_si512(of.offsets + 16 * part));
      const __m512 of_columns = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_loadu_ps(of.scales + 16 * part));
      float* const total = totals[row] + 16 * part;
      _mm512_storeu_ps(total, _mm512_fmadd_ps(of_columns, of_row, _mm512_loadu_ps(total)));
    }
  }
}

// Add the products of so many rows to totals, and fetch what is read next.
inline void add_unpacked_vnni(UnpackedArguments of, int64_t count, const uint8_t* next, int64_t next_bytes,
                              float (*totals)[kBlock]) {
  constexpr int64_t most = 6;
  using Function = void (*)(const UnpackedArguments&, float (*)[kBlock]);
  static constexpr Function by_rows[most] = {add_unpacked_vnni<1>, add_unpacked_vnni<2>, add_unpacked_vnni<3>,
                                             add_unpacked_vnni<4>, add_unpacked_vnni<5>, add_unpacked_vnni<6>};
  LinesAhead ahead(next, next_bytes, (count + most - 1) / most);
  for (; count > 0; count -= most) {
    ahead.fetch();
    by_rows[std::min(most, count) - 1](of, totals);
    of.rows += most * of.stride;
    of.row_scales += most * of.scale_stride;
    totals += most;
  }
}

#endif

}  // namespace polycast_cpu
