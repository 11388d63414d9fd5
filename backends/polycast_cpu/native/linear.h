// Linear layers. Two passes over each row of activations find its scale and quantize it; then the product goes block by block, and
// each block is scaled into the output while it is in the cache.
#pragma once

#include <ATen/ops/empty.h>

#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

#include "pack.h"
#include "product.h"
#include "quantize.h"
#include "tensors.h"

namespace polycast_cpu {

// Quantize rows; return the indices of rows with inf or nan, which become zeros.
template <typename T>
std::vector<int64_t> quantize(Isa isa, const T* rows, int64_t row_step, int64_t count, int64_t terms, bool by_row,
                              uint8_t* out, float* scales) {
  const int64_t stride = row_stride(terms);
  std::atomic<bool> all_finite = true;
  std::vector<uint32_t> magnitudes(by_row ? 0 : count);
  const auto quantize_one = [&](int64_t row) {
    if (scales[row] == 0) {
      std::fill_n(out + row * stride, terms, kZeroPoint);
      all_finite = false;
    } else {
      quantize_row(isa, rows + row * row_step, terms, 1 / scales[row], out + row * stride);
    }
  };
  for_each_part(count, grain(terms), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint32_t magnitude = largest_magnitude(isa, rows + row * row_step, terms);
      scales[row] = is_finite(magnitude) ? scale_of(magnitude) : 0;
      if (by_row) {
        quantize_one(row);
      }
    }
  });
  if (!by_row) {
    const float scale = *std::max_element(scales, scales + count);
    for_each_part(count, grain(terms), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        scales[row] = scales[row] == 0 ? 0 : scale;
        quantize_one(row);
      }
    });
  }
  std::vector<int64_t> others;
  for (int64_t row = 0; row < count && !all_finite; ++row) {
    if (scales[row] == 0) {
      others.push_back(row);
    }
  }
  return others;
}

// Compute a row with inf or nan from these alone: finite values do not change the result.
template <typename T, typename Out>
void product_of_nonfinite(const T* row, const Weight& weight, float alpha, const float* bias, Out* out) {
  std::vector<int64_t> places;
  for (int64_t k = 0; k < weight.terms; ++k) {
    if (!std::isfinite(static_cast<float>(row[k]))) {
      places.push_back(k);
    }
  }
  for (int64_t n = 0; n < weight.columns; ++n) {
    float sum = 0;
    for (int64_t k : places) {
      sum += static_cast<float>(row[k]) * weight.value(n, k);
      if (std::isnan(sum)) {
        break;
      }
    }
    out[n] = static_cast<Out>(bias == nullptr ? alpha * sum : alpha * sum + bias[n]);
  }
}

// Return alpha * x @ weight.T + bias, for any number of dimensions of x.
inline at::Tensor int8_linear(const at::Tensor& x, const at::Tensor& values, const at::Tensor& scales,
                       const at::Tensor& offsets, const std::optional<at::Tensor>& bias, double alpha, bool by_row,
                       at::ScalarType dtype, int64_t isa_number) {
  const auto isa = static_cast<Isa>(isa_number);
  const int64_t terms = x.size(-1), columns = scales.size(0);
  const Weight weight = weight_of(values, scales, offsets, terms);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = columns;
  at::Tensor out = at::empty(shape, x.options().dtype(dtype));
  if (out.numel() == 0) {
    return out;
  }
  const at::Tensor matrix = with_dense_rows(x.dim() == 2 ? x : x.reshape({-1, terms}));
  const int64_t rows = matrix.size(0), stride = row_stride(terms);

  at::Tensor added;
  int64_t bias_step = 0;
  if (bias.has_value()) {
    added = bias->to(at::kFloat);
    if (added.dim() != 1 || added.size(0) != columns) {  // rarely; a view costs time
      added = added.expand({rows, columns});
      bias_step = added.stride(0);
    }
    if (added.stride(-1) != 1) {
      added = added.contiguous();
      bias_step = added.dim() == 1 ? 0 : columns;
    }
  }
  const float* const bias_values = bias.has_value() ? added.const_data_ptr<float>() : nullptr;

  const int64_t tiled_rows = (rows + kMostRows - 1) / kMostRows * kMostRows;
  const at::Tensor quantized = at::empty({tiled_rows * stride}, at::kByte);
  std::vector<float> row_scales(rows);
  float* const scale = row_scales.data();
  with_elements(matrix, [&](const auto* elements) {
    const std::vector<int64_t> others = quantize(isa, elements, matrix.stride(0), rows, terms, by_row,
                                                 quantized.data_ptr<uint8_t>(), scale);
    for (int64_t row = 0; alpha != 1 && row < rows; ++row) {
      scale[row] *= static_cast<float>(alpha);
    }
    with_elements(out, [&](auto* result) {
      const Activations activations{quantized.data_ptr<uint8_t>(), scale, rows, stride};
      product(isa, activations, weight, bias_values, bias_step, result);
      for (int64_t row : others) {
        product_of_nonfinite(elements + row * matrix.stride(0), weight, static_cast<float>(alpha),
                             bias_values == nullptr ? nullptr : bias_values + row * bias_step, result + row * columns);
      }
    });
  });
  return out;
}

}  // namespace polycast_cpu
