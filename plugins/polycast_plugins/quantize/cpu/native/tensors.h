// Typed access to tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "huge_pages.h"

namespace polycast_cpu {

// Call a function with a typed pointer to the elements, which are float32, bfloat16 or float16.
template <typename Function>
void with_elements(const at::Tensor& tensor, const Function& function) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return function(tensor.data_ptr<float>());
    case at::kBFloat16:
      return function(tensor.data_ptr<at::BFloat16>());
    case at::kHalf:
      return function(tensor.data_ptr<at::Half>());
    default:
      TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", tensor.scalar_type());
  }
}

// Return the matrix with contiguous rows.
inline at::Tensor with_dense_rows(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 || matrix.size(1) == 1 ? matrix : matrix.contiguous();
}

// Return zeros for a prepacked weight, in huge pages if possible.
inline at::Tensor zeros_for_weight(at::IntArrayRef shape, at::ScalarType dtype) {
  const at::Tensor zeros = polycast::zeros_in_huge_pages(shape, dtype);
  return zeros.defined() ? zeros : at::zeros(shape, dtype);
}

// Return equalization factors of so many terms as a vector of float32, empty if there are none.
inline at::Tensor checked_factors(const std::optional<at::Tensor>& factors, int64_t terms) {
  if (!factors.has_value()) {
    return at::empty({0}, at::kFloat);
  }
  TORCH_CHECK(factors->dim() == 1 && factors->size(0) == terms && factors->scalar_type() == at::kFloat,
              "expected a float32 factor for each of ", terms, " terms, got ", factors->sizes(), " in ",
              factors->scalar_type());
  return factors->contiguous();
}

// Return a pointer to so many factors, nullptr if there are none.
inline const float* factors_in(const at::Tensor& factors, int64_t terms) {
  TORCH_CHECK(factors.numel() == 0 || factors.numel() == terms, "the activations have ", terms, " terms, and there are ",
              factors.numel(), " factors");
  return factors.numel() == 0 ? nullptr : factors.const_data_ptr<float>();
}

// Return an uninitialized tensor for the product of x, [..., K], by a weight of so many columns.
inline at::Tensor empty_product(const at::Tensor& x, const c10::SymInt& columns, at::ScalarType dtype) {
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  TORCH_CHECK(!shape.empty(), "expected activations with at least one dimension, got a number");
  shape.back() = columns;
  return at::empty_symint(shape, x.options().dtype(dtype));
}

// A bias that is broadcast to a matrix, in float32; without values if there is none.
class Bias {
 public:
  Bias(const std::optional<at::Tensor>& bias, int64_t rows, int64_t columns) {
    if (!bias.has_value() || !bias->defined()) {
      return;
    }
    tensor_ = bias->scalar_type() == at::kFloat ? *bias : bias->to(at::kFloat);
    if (tensor_.dim() != 1 || tensor_.size(0) != columns) {  // rarely; a view costs time
      tensor_ = tensor_.expand({rows, columns});
      step_ = tensor_.stride(0);
    }
    if (tensor_.stride(-1) != 1) {
      tensor_ = tensor_.contiguous();
      step_ = tensor_.dim() == 1 ? 0 : columns;
    }
    values_ = tensor_.const_data_ptr<float>();
  }

  // Of a row; nullptr if there is no bias.
  const float* row(int64_t number) const { return values_ == nullptr ? nullptr : values_ + number * step_; }

  const float* values() const { return values_; }
  int64_t step() const { return step_; }

 private:
  at::Tensor tensor_;
  const float* values_ = nullptr;
  int64_t step_ = 0;
};

// Return what addmm adds; nothing for a beta of 0, for which torch ignores the bias, nan included.
inline std::optional<at::Tensor> times_beta(const at::Tensor& bias, const at::Scalar& beta) {
  const double factor = beta.toDouble();
  if (factor == 0) {
    return std::nullopt;
  }
  return factor == 1 ? bias : bias.to(at::kFloat).mul(beta);
}

}  // namespace polycast_cpu
