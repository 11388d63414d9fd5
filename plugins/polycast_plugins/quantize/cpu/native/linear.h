// Linear layers. Two passes over each row of activations find its scale and quantize it; then the product goes block by block, and
// each block is scaled into the output while it is in the cache.
#pragma once

#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

#include "equalize.h"
#include "pack.h"
#include "product.h"
#include "quantize.h"
#include "scratch.h"
#include "tensors.h"

namespace polycast_cpu {

// Quantize rows, multiplied by factors if there are some; return the indices of rows with inf or nan, which become zeros.
template <typename T>
std::vector<int64_t> quantize(Isa isa, const T* rows, int64_t row_step, int64_t count, int64_t terms,
                              const float* factors, bool by_row, uint8_t* out, float* scales) {
  const int64_t stride = row_stride(terms);
  std::atomic<bool> all_finite = true;
  std::vector<uint32_t> magnitudes(by_row ? 0 : count);
  const auto for_each_row = [&](const auto& function) {
    for_each_part(count, grain(terms), [&](int64_t begin, int64_t end) {
      Equalizer equalizer(isa, factors, terms);
      for (int64_t row = begin; row < end; ++row) {
        equalizer.with_row(rows + row * row_step, [&](const auto* values) { function(row, values); });
      }
    });
  };
  const auto quantize_one = [&](int64_t row, const auto* values) {
    if (scales[row] == 0) {
      std::fill_n(out + row * stride, terms, kZeroPoint);
      all_finite = false;
    } else {
      quantize_row(isa, values, terms, 1 / scales[row], out + row * stride);
    }
  };
  for_each_row([&](int64_t row, const auto* values) {
    const uint32_t magnitude = largest_magnitude(isa, values, terms);
    scales[row] = is_finite(magnitude) ? scale_of(magnitude) : 0;
    if (by_row) {
      quantize_one(row, values);
    }
  });
  if (!by_row) {
    const float scale = *std::max_element(scales, scales + count);
    for_each_row([&](int64_t row, const auto* values) {
      scales[row] = scales[row] == 0 ? 0 : scale;
      quantize_one(row, values);
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
template <typename T, typename AnyWeight, typename Out>
void product_of_nonfinite(const T* row, const AnyWeight& weight, float alpha, const float* bias, Out* out) {
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

// Return alpha * x @ weight.T + bias, for any number of dimensions of x, which is multiplied by `factors` first if it has elements.
inline at::Tensor int8_product(const at::Tensor& x, const at::Tensor& values, const at::Tensor& scales,
                               const at::Tensor& offsets, const at::Tensor& factors,
                               const std::optional<at::Tensor>& bias, double alpha, at::ScalarType dtype, bool by_row,
                               int64_t isa_number) {
  const auto isa = static_cast<Isa>(isa_number);
  const int64_t columns = scales.size(0);
  at::Tensor out = empty_product(x, columns, dtype);
  const int64_t terms = x.size(-1);
  const Weight weight = weight_of(values, scales, offsets, terms);
  if (out.numel() == 0) {
    return out;
  }
  const at::Tensor matrix = with_dense_rows(x.dim() == 2 ? x : x.reshape({-1, terms}));
  const int64_t rows = matrix.size(0), stride = row_stride(terms);
  const Bias added(bias, rows, columns);
  const float* const multipliers = factors_in(factors, terms);

  const size_t size = aligned(rows * sizeof(float));
  const Scratch scratch(size + tiled(rows) * stride);
  float* const scale = scratch.at<float>(0);
  uint8_t* const quantized = scratch.at<uint8_t>(size);
  with_elements(matrix, [&](const auto* elements) {
    const std::vector<int64_t> others =
        quantize(isa, elements, matrix.stride(0), rows, terms, multipliers, by_row, quantized, scale);
    for (int64_t row = 0; alpha != 1 && row < rows; ++row) {
      scale[row] *= static_cast<float>(alpha);
    }
    with_elements(out, [&](auto* result) {
      product(isa, {quantized, scale, rows, stride}, weight, added.values(), added.step(), result);
      Equalizer equalizer(isa, others.empty() ? nullptr : multipliers, terms);
      for (int64_t row : others) {
        equalizer.with_row(elements + row * matrix.stride(0), [&](const auto* values_of_row) {
          product_of_nonfinite(values_of_row, weight, static_cast<float>(alpha), added.row(row), result + row * columns);
        });
      }
    });
  });
  return out;
}

// The ops that stand for linear, matmul, mm and addmm do not read the weight itself.

inline at::Tensor int8_linear(const at::Tensor& x, const at::Tensor&, const std::optional<at::Tensor>& bias,
                              const at::Tensor& values, const at::Tensor& scales, const at::Tensor& offsets,
                              const at::Tensor& factors, at::ScalarType dtype, bool by_row, int64_t isa) {
  return int8_product(x, values, scales, offsets, factors, bias, 1, dtype, by_row, isa);
}

inline at::Tensor int8_matmul(const at::Tensor& x, const at::Tensor&, const at::Tensor& values,
                              const at::Tensor& scales, const at::Tensor& offsets, const at::Tensor& factors,
                              at::ScalarType dtype, bool by_row, int64_t isa) {
  return int8_product(x, values, scales, offsets, factors, std::nullopt, 1, dtype, by_row, isa);
}

inline at::Tensor int8_addmm(const at::Tensor& bias, const at::Tensor& x, const at::Tensor&, const at::Scalar& beta,
                             const at::Scalar& alpha, const at::Tensor& values, const at::Tensor& scales,
                             const at::Tensor& offsets, const at::Tensor& factors, at::ScalarType dtype, bool by_row,
                             int64_t isa) {
  return int8_product(x, values, scales, offsets, factors, times_beta(bias, beta), alpha.toDouble(), dtype, by_row, isa);
}

}  // namespace polycast_cpu
