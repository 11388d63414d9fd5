// Prepacking of weights: quantization and layout.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/reciprocal.h>

#include <array>
#include <atomic>
#include <vector>

#include "equalize.h"
#include "layout.h"
#include "parts.h"
#include "quantize.h"
#include "tensors.h"

namespace polycast_cpu {

// Quantize a column of a weight into its block; return false if it cannot be quantized.
template <typename T>
bool pack_column(Isa isa, const T* row, int64_t terms, uint8_t* quantized, int8_t* block, float& scale, int32_t& offset) {
  const uint32_t magnitude = largest_magnitude(isa, row, terms);
  if (magnitude > std::bit_cast<uint32_t>(kLargestWeight)) {
    return false;
  }
  scale = scale_of(magnitude);
  quantize_row(isa, row, terms, 1 / scale, quantized);
  int32_t sum = 0;
  for (int64_t k = 0; k < terms; ++k) {
    const int value = quantized[k] - kZeroPoint;
    block[k / 4 * 4 * kBlock + k % 4] = static_cast<int8_t>(value);
    sum += value;
  }
  offset = kZeroPoint * sum;
  return true;
}

template <typename T>
bool pack(Isa isa, const T* rows, int64_t stride, int64_t columns, int64_t terms, const float* factors, int8_t* values,
          float* scales, int32_t* offsets) {
  const int64_t size = blocks(terms) * kBlock * kBlock;
  std::atomic<bool> possible = true;
  for_each_part(blocks(columns), grain(size), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> quantized(terms);
    Equalizer equalizer(isa, factors, terms);
    for (int64_t column = begin * kBlock; column < std::min(columns, end * kBlock); ++column) {
      int8_t* const block = values + column / kBlock * size + column % kBlock * 4;
      const bool is_packed = equalizer.with_row(rows + column * stride, [&](const auto* row) {
        return pack_column(isa, row, terms, quantized.data(), block, scales[column], offsets[column]);
      });
      if (!is_packed) {
        possible = false;
        return;
      }
    }
  });
  return possible;
}

// Return the values, scales and offsets of a weight [N, K], multiplied by equalization factors [K] if they are given, and the
// inverse factors, to multiply activations by, empty if there are none. Return an empty list if it cannot be quantized.
inline std::vector<at::Tensor> int8_pack(const at::Tensor& weight, const std::optional<at::Tensor>& factors, int64_t isa) {
  TORCH_CHECK(weight.dim() == 2, "expected a matrix, got ", weight.dim(), " dimensions");
  const at::Tensor rows = with_dense_rows(weight);
  const int64_t columns = rows.size(0), terms = rows.size(1);
  const at::Tensor by = checked_factors(factors, terms);
  const std::array<int64_t, 4> shape{blocks(columns), blocks(terms) * kBlock / 4, kBlock, 4};
  const at::Tensor values = zeros_for_weight(shape, at::kChar);
  at::Tensor scales = at::empty({columns}, at::kFloat), offsets = at::empty({columns}, at::kInt);
  bool possible = false;
  with_elements(rows, [&](const auto* elements) {
    possible = pack(static_cast<Isa>(isa), elements, rows.stride(0), columns, terms, factors_in(by, terms),
                    values.data_ptr<int8_t>(), scales.data_ptr<float>(), offsets.data_ptr<int32_t>());
  });
  return possible ? std::vector<at::Tensor>{values, scales, offsets, by.reciprocal()} : std::vector<at::Tensor>{};
}

// Return the Weight of the tensors that int8_pack() returned.
inline Weight weight_of(const at::Tensor& values, const at::Tensor& scales, const at::Tensor& offsets, int64_t terms) {
  TORCH_CHECK(values.dim() == 4 && values.size(1) * 4 == blocks(terms) * kBlock, "the activations have ", terms,
              " terms, the weight another number");
  return {values.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(), offsets.const_data_ptr<int32_t>(),
          scales.size(0), terms};
}

}  // namespace polycast_cpu
