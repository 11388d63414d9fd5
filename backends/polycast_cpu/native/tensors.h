// Typed access to tensors.
#pragma once

#include <ATen/core/Tensor.h>

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
at::Tensor with_dense_rows(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 || matrix.size(1) == 1 ? matrix : matrix.contiguous();
}

}  // namespace polycast_cpu
