// Prepacking of weights in 4 bits: the choice of scales and multipliers, and the layout.
#pragma once

#include <ATen/ops/reciprocal.h>
#include <c10/util/BFloat16.h>

#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "equalize.h"
#include "int4_layout.h"
#include "parts.h"
#include "quantize.h"
#include "tensors.h"

namespace polycast_cpu {

// Round to the nearest integer, ties to even, a number of magnitude below 2^22: without SSE4.1, nearbyint() is a slow function.
inline float rounded(float value) {
  constexpr float kIntegers = 0x1.8p23f;  // floats near it are the integers
  return (value + kIntegers) - kIntegers;
}

// Return the level of a term in units of its group's step.
inline float level_of(float value) {
  return rounded(std::clamp(value, -8.0f, 7.0f));
}

// Return the squared error of the terms of a group with a multiplier.
inline float error_of(const float* terms, int64_t count, float multiplier) {
  const float inverse = 1 / multiplier;
  const auto squared_error = [&](float term) {
    const float difference = term - level_of(term * inverse) * multiplier;
    return difference * difference;
  };
  float errors[4] = {};  // so that the processor does not wait for additions
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    errors[0] += squared_error(terms[k]);
    errors[1] += squared_error(terms[k + 1]);
    errors[2] += squared_error(terms[k + 2]);
    errors[3] += squared_error(terms[k + 3]);
  }
  for (; k < count; ++k) {
    errors[0] += squared_error(terms[k]);
  }
  return (errors[0] + errors[1]) + (errors[2] + errors[3]);
}

// Return the multiplier with the least squared error for the terms of a group, in units of the chunk's scale. The value of the
// largest magnitude comes near the level -8, the only one of its magnitude; so multipliers may be negative.
inline int best_multiplier(const float* terms, int64_t count, float largest) {
  const int near = static_cast<int>(rounded(largest / -8));
  int best = largest > 0 ? -1 : 1;
  float least = std::numeric_limits<float>::infinity();
  for (const int multiplier : {near, near - 1, near + 1}) {
    if (multiplier == 0 || std::abs(multiplier) > Int4Weight::kMaxMultiplier) {
      continue;
    }
    const float error = error_of(terms, count, static_cast<float>(multiplier));
    if (error < least) {
      least = error;
      best = multiplier;
    }
  }
  return best;
}

// Pack one column of a chunk: `terms`, which are overwritten.
inline void pack_chunk(const Groups& groups, float* terms, int64_t count, float magnitude, int64_t lane, uint8_t* chunk) {
  const c10::BFloat16 scale(std::max(magnitude, kSmallest) / (8 * Int4Weight::kMaxMultiplier));
  std::memcpy(chunk + 2 * lane, &scale.x, sizeof scale.x);
  const float inverse = 1 / static_cast<float>(scale);
  for (int64_t k = 0; k < count; ++k) {
    terms[k] *= inverse;
  }
  uint8_t* group = chunk + Int4Weight::kScaleBytes;
  for (int64_t first = 0; first < count; first += groups.group, group += Int4Weight::group_bytes(groups.group)) {
    const int64_t size = std::min(groups.group, count - first);
    const float largest = *std::max_element(terms + first, terms + first + size,
                                            [](float a, float b) { return std::abs(a) < std::abs(b); });
    const int multiplier = best_multiplier(terms + first, size, largest);
    group[lane] = static_cast<uint8_t>(static_cast<int8_t>(multiplier));
    const float of_group = 1 / static_cast<float>(multiplier);
    for (int64_t k = 0; k < size; ++k) {
      Int4Weight::set_level(group, lane, k, static_cast<int>(level_of(terms[first + k] * of_group)) + Int4Weight::kZero);
    }
  }
}

// Pack a column of a weight into its block; return false if a value is inf, nan or too large.
template <typename T>
bool pack_int4_column(const T* row, const Groups& groups, float* terms, int64_t lane, uint8_t* block) {
  for (int64_t number = 0; number < groups.chunks(); ++number) {
    const T* const from = row + number * groups.chunk;
    const int64_t count = groups.terms_of_chunk(number);
    const uint32_t magnitude = largest_magnitude_plain(from, count);
    if (magnitude > std::bit_cast<uint32_t>(kLargestWeight)) {
      return false;
    }
    std::copy_n(from, count, terms);
    pack_chunk(groups, terms, count, std::bit_cast<float>(magnitude), lane, block);
    block += Int4Weight::chunk_bytes(groups, count);
  }
  return true;
}

// Pack the rows of a weight [N, K] into zeros; return false if it cannot be packed.
template <typename T>
bool pack_int4(const T* rows, int64_t stride, int64_t columns, const Groups& groups, const float* factors,
               uint8_t* values) {
  const int64_t size = Int4Weight::block_bytes(groups);
  std::atomic<bool> possible = true;
  for_each_part(blocks(columns), grain(8 * size), [&](int64_t begin, int64_t end) {
    std::vector<float> terms(groups.chunk);
    Equalizer equalizer(Isa::plain, factors, groups.terms);
    for (int64_t column = begin * kBlock; column < std::min(columns, end * kBlock); ++column) {
      const bool is_packed = equalizer.with_row(rows + column * stride, [&](const auto* row) {
        return pack_int4_column(row, groups, terms.data(), column % kBlock, values + column / kBlock * size);
      });
      if (!is_packed) {
        possible = false;
        return;
      }
    }
  });
  return possible;
}

// Return what a weight [N, K], multiplied by equalization factors [K] if they are given, is packed into, and the inverse factors,
// to multiply activations by, empty if there are none. Return an empty list if it cannot be packed.
inline std::vector<at::Tensor> int4_pack(const at::Tensor& weight, const std::optional<at::Tensor>& factors,
                                         int64_t group_size) {
  TORCH_CHECK(weight.dim() == 2, "expected a matrix, got ", weight.dim(), " dimensions");
  TORCH_CHECK(group_size > 0 && group_size % 16 == 0, "expected a group size that 16 divides, got ", group_size);
  const at::Tensor rows = with_dense_rows(weight);
  const int64_t columns = rows.size(0);
  const Groups groups(rows.size(1), group_size);
  const at::Tensor by = checked_factors(factors, groups.terms);
  const std::array<int64_t, 2> shape{blocks(columns), Int4Weight::block_bytes(groups)};
  const at::Tensor values = zeros_for_weight(shape, at::kByte);
  bool possible = false;
  with_elements(rows, [&](const auto* elements) {
    possible = pack_int4(elements, rows.stride(0), columns, groups, factors_in(by, groups.terms),
                         values.data_ptr<uint8_t>());
  });
  return possible ? std::vector<at::Tensor>{values, by.reciprocal()} : std::vector<at::Tensor>{};
}

// Pack the levels of a weight of so many terms, which were chosen before; see int4_levels.py for the arguments.
inline std::vector<at::Tensor> int4_pack_levels(const at::Tensor& levels, const at::Tensor& multipliers,
                                                const at::Tensor& scales, const std::optional<at::Tensor>& factors,
                                                int64_t terms, int64_t group_size) {
  TORCH_CHECK(terms > 0 && group_size > 0 && group_size % 16 == 0, "expected terms, and a group size that 16 divides, got ",
              terms, " and ", group_size);
  const Groups groups(terms, group_size);
  const auto check = [&](const at::Tensor& given, at::ScalarType dtype, int64_t count, const char* name) {
    TORCH_CHECK(given.dim() == 2 && given.scalar_type() == dtype && given.size(1) == count &&
                    given.size(0) == levels.size(0) && given.is_contiguous(),
                "expected ", count, " ", name, " for each output feature, contiguous, in ", dtype, ", got ", given.sizes(),
                " in ", given.scalar_type());
  };
  check(levels, at::kByte, (terms + 1) / 2, "pairs of levels");
  check(multipliers, at::kChar, groups.groups_of(terms), "multipliers");
  check(scales, at::kBFloat16, groups.chunks(), "scales");
  TORCH_CHECK(multipliers.clamp(-Int4Weight::kMaxMultiplier, Int4Weight::kMaxMultiplier).equal(multipliers),
              "expected multipliers of magnitudes up to ", Int4Weight::kMaxMultiplier);
  const at::Tensor by = checked_factors(factors, terms);
  const int64_t columns = levels.size(0), size = Int4Weight::block_bytes(groups);
  const at::Tensor values = zeros_for_weight(std::array<int64_t, 2>{blocks(columns), size}, at::kByte);
  auto* const blocks_of_values = values.data_ptr<uint8_t>();
  const auto* const pairs = levels.const_data_ptr<uint8_t>();
  const auto* const steps = multipliers.const_data_ptr<int8_t>();
  const auto* const chunk_scales = scales.const_data_ptr<c10::BFloat16>();
  for_each_part(blocks(columns), grain(8 * size), [&](int64_t begin, int64_t end) {
    for (int64_t column = begin * kBlock; column < std::min(columns, end * kBlock); ++column) {
      const int64_t lane = column % kBlock;
      uint8_t* to = blocks_of_values + column / kBlock * size;
      for (int64_t k = 0; k < terms; k += groups.group) {
        if (k % groups.chunk == 0) {
          std::memcpy(to + 2 * lane, chunk_scales + column * scales.size(1) + k / groups.chunk, 2);
          to += Int4Weight::kScaleBytes;
        }
        const int64_t count = std::min(groups.group, terms - k);
        to[lane] = static_cast<uint8_t>(steps[column * multipliers.size(1) + k / groups.group]);
        for (int64_t term = k; term < k + count; ++term) {
          const uint8_t pair = pairs[column * levels.size(1) + term / 2];
          Int4Weight::set_level(to, lane, term - k, term % 2 == 0 ? pair & 15 : pair >> 4);
        }
        to += Int4Weight::group_bytes(count);
      }
    }
  });
  return {values, by.reciprocal()};
}

}  // namespace polycast_cpu
