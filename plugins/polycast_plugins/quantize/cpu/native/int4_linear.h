// Linear layers with weights in 4 bits.
#pragma once

#include <optional>

#include "int4_pack.h"
#include "int4_product.h"
#include "linear.h"

namespace polycast_cpu {

// Return alpha * x @ weight.T + bias, given a packed weight of so many columns, for any number of dimensions of x, which is multiplied
// by `factors` first if it has elements.
inline at::Tensor int4_product(const at::Tensor& x, const at::Tensor& values, const at::Tensor& factors,
                               int64_t columns, const std::optional<at::Tensor>& bias, double alpha, at::ScalarType dtype,
                               int64_t group_size, int64_t isa_number) {
  const auto isa = static_cast<Isa>(isa_number);
  at::Tensor out = empty_product(x, columns, dtype);
  const int64_t terms = x.size(-1);
  const Groups groups(terms, group_size);
  TORCH_CHECK(values.dim() == 2 && values.size(0) == blocks(columns) && values.size(1) == Int4Weight::block_bytes(groups),
              "the packed weight is not one of ", columns, " features and ", terms, " terms in groups of ", group_size);
  if (out.numel() == 0) {
    return out;
  }
  const at::Tensor matrix = with_dense_rows(x.dim() == 2 ? x : x.reshape({-1, terms}));
  const int64_t rows = matrix.size(0);
  const Int4Weight weight{values.const_data_ptr<uint8_t>(), columns, terms, groups};
  const Bias added(bias, rows, columns);
  const float* const multipliers = factors_in(factors, terms);
  const Scratch scratch(ChunkedActivations::bytes(rows, groups));
  const ChunkedActivations activations(scratch, rows, groups);
  with_elements(matrix, [&](const auto* elements) {
    const std::vector<int64_t> others =
        quantize_chunks(isa, elements, matrix.stride(0), groups, multipliers, activations);
    if (is_direct(isa, rows, groups)) {
      make_signed(groups, activations);
    }
    for (int64_t i = 0; alpha != 1 && i < rows * activations.chunks; ++i) {
      activations.scales[i] *= static_cast<float>(alpha);
    }
    with_elements(out, [&](auto* result) {
      int4_product(isa, activations, weight, added, result);
      Equalizer equalizer(isa, others.empty() ? nullptr : multipliers, terms);
      for (int64_t row : others) {
        equalizer.with_row(elements + row * matrix.stride(0), [&](const auto* of_row) {
          product_of_nonfinite(of_row, weight, static_cast<float>(alpha), added.row(row), result + row * columns);
        });
      }
    });
  });
  return out;
}

// The ops that stand for linear, matmul, mm and addmm do not read the weight itself.

inline at::Tensor int4_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              const at::Tensor& values, const at::Tensor& factors, at::ScalarType dtype, int64_t group_size,
                              int64_t isa) {
  return int4_product(x, values, factors, weight.size(0), bias, 1, dtype, group_size, isa);
}

inline at::Tensor int4_matmul(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& values,
                              const at::Tensor& factors, at::ScalarType dtype, int64_t group_size, int64_t isa) {
  return int4_product(x, values, factors, weight.size(1), std::nullopt, 1, dtype, group_size, isa);
}

inline at::Tensor int4_addmm(const at::Tensor& bias, const at::Tensor& x, const at::Tensor& weight,
                             const at::Scalar& beta, const at::Scalar& alpha, const at::Tensor& values,
                             const at::Tensor& factors, at::ScalarType dtype, int64_t group_size, int64_t isa) {
  return int4_product(x, values, factors, weight.size(1), times_beta(bias, beta), alpha.toDouble(), dtype, group_size, isa);
}

}  // namespace polycast_cpu
