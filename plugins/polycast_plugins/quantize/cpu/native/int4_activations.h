// Activations for weights in 4 bits: bytes with a scale for each row and chunk.
#pragma once

#include <atomic>
#include <cmath>
#include <vector>

#include "equalize.h"
#include "int4_layout.h"
#include "multiply.h"
#include "parts.h"
#include "quantize.h"
#include "scratch.h"

namespace polycast_cpu {

// More rows are multiplied in 8 bits; the second number is that of AVX512-VNNI without AMX.
constexpr int64_t kMaxDirect = 12, kMaxDirectVnni = 24;

// Rows of bytes with zero point 128. The stride is no multiple of 4096 bytes; rows are padded with zeros to eights.
struct ChunkedActivations {
  uint8_t* values;
  float* scales;     // of each row and chunk
  int32_t* offsets;  // of each row and group, for signed bytes
  int64_t rows, stride, chunks, groups;

  ChunkedActivations(const Scratch& scratch, int64_t rows, const Groups& groups)
      : rows(rows), stride(row_stride(groups.terms)), chunks(groups.chunks()), groups(groups.groups_of(groups.terms)) {
    const size_t before = aligned(rows * chunks * sizeof(float));
    scales = scratch.at<float>(0);
    offsets = scratch.at<int32_t>(before);
    values = scratch.at<uint8_t>(before + aligned(rows * this->groups * sizeof(int32_t)));
  }

  static size_t bytes(int64_t rows, const Groups& groups) {
    return aligned(rows * groups.chunks() * sizeof(float)) +
           aligned(rows * groups.groups_of(groups.terms) * sizeof(int32_t)) +
           (rows <= kMaxDirect ? rows : tiled(rows)) * row_stride(groups.terms);
  }

  uint8_t* row(int64_t number) const { return values + number * stride; }
};

// Quantize a row; return false and make it zeros if it has inf or nan.
template <typename T>
bool quantize_chunks(Isa isa, const T* from, const Groups& groups, const ChunkedActivations& to, int64_t row) {
  uint8_t* const out = to.row(row);
  float* const scales = to.scales + row * to.chunks;
  std::fill_n(out + groups.terms, Groups::padded(groups.terms) - groups.terms, kZeroPoint);
  for (int64_t number = 0; number < to.chunks; ++number) {
    const int64_t first = number * groups.chunk, count = groups.terms_of_chunk(number);
    const uint32_t magnitude = largest_magnitude(isa, from + first, count);
    if (!is_finite(magnitude)) {
      std::fill_n(out, groups.terms, kZeroPoint);
      std::fill_n(scales, to.chunks, 0.0f);
      return false;
    }
    scales[number] = scale_of(magnitude);
    quantize_row(isa, from + first, count, 1 / scales[number], out + first);
  }
  return true;
}

// Quantize all rows, multiplied by factors if there are some; return the indices of those with inf or nan.
template <typename T>
std::vector<int64_t> quantize_chunks(Isa isa, const T* from, int64_t step, const Groups& groups, const float* factors,
                                     const ChunkedActivations& to) {
  std::atomic<bool> all_finite = true;
  std::vector<uint8_t> finite(to.rows);
  for_each_part(to.rows, grain(groups.terms), [&](int64_t begin, int64_t end) {
    Equalizer equalizer(isa, factors, groups.terms);
    for (int64_t row = begin; row < end; ++row) {
      finite[row] = equalizer.with_row(
          from + row * step, [&](const auto* values) { return quantize_chunks(isa, values, groups, to, row); });
      if (!finite[row]) {
        all_finite = false;
      }
    }
  });
  std::vector<int64_t> others;
  for (int64_t row = 0; row < to.rows && !all_finite; ++row) {
    if (!finite[row]) {
      others.push_back(row);
    }
  }
  return others;
}

// Make the bytes of all rows signed, and find the offsets of their groups.
inline void make_signed(const Groups& groups, const ChunkedActivations& x) {
  constexpr uint64_t kSigns = 0x8080808080808080u, kEven = 0x00ff00ff00ff00ffu;
  const int64_t padded = Groups::padded(groups.terms);
  for (int64_t row = 0; row < x.rows; ++row) {
    uint8_t* const values = x.row(row);
    for (int64_t group = 0; group < x.groups; ++group) {
      const int64_t begin = group * groups.group, end = std::min(padded, begin + groups.group);
      int64_t sum = 0;
      for (int64_t k = begin; k < end; k += Groups::kEight) {
        uint64_t eight;
        std::memcpy(&eight, values + k, sizeof eight);
        // The sums of bytes with even and odd indices, then of four numbers of 16 bits.
        const uint64_t pairs = (eight & kEven) + (eight >> 8 & kEven);
        sum += static_cast<int64_t>(pairs * 0x0001000100010001u >> 48);
        eight ^= kSigns;
        std::memcpy(values + k, &eight, sizeof eight);
      }
      x.offsets[row * x.groups + group] =
          static_cast<int32_t>(-Int4Weight::kZero * (sum - kZeroPoint * (end - begin)));
    }
  }
}

}  // namespace polycast_cpu
