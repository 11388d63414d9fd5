// The results of the ops without their elements, for compilers. `Rest` is what follows the arguments of torch's op: prepacked
// tensors, the fast dtype and constants.
#pragma once

#include <ATen/ops/conv2d.h>

#include <optional>
#include <tuple>
#include <type_traits>

#include "conv2d.h"
#include "tensors.h"

namespace polycast_cpu {

template <typename... Rest>
at::ScalarType dtype_in(const Rest&... rest) {
  return std::get<at::ScalarType>(std::tuple<Rest...>(rest...));
}

template <typename... Rest>
at::Tensor fake_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>&, Rest... rest) {
  return empty_product(x, weight.sym_size(0), dtype_in(std::decay_t<Rest>(rest)...));
}

template <typename... Rest>
at::Tensor fake_matmul(const at::Tensor& x, const at::Tensor& weight, Rest... rest) {
  return empty_product(x, weight.sym_size(1), dtype_in(std::decay_t<Rest>(rest)...));
}

template <typename... Rest>
at::Tensor fake_addmm(const at::Tensor&, const at::Tensor& x, const at::Tensor& weight, const at::Scalar&,
                      const at::Scalar&, Rest... rest) {
  return empty_product(x, weight.sym_size(1), dtype_in(std::decay_t<Rest>(rest)...));
}

template <typename Padding, typename... Rest>
at::Tensor fake_conv2d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>&,
                       c10::SymIntArrayRef stride, Padding padding, c10::SymIntArrayRef dilation, c10::SymInt groups,
                       Rest... rest) {
  const at::ScalarType dtype = dtype_in(std::decay_t<Rest>(rest)...);
  const at::Tensor images = x.dim() == 3 ? x.unsqueeze(0) : x;
  const at::Tensor result = at::conv2d_symint(images.to(dtype), weight.to(dtype), {}, stride, padding, dilation, groups);
  const at::Tensor formatted = result.contiguous(convolution_format(images, weight));
  return x.dim() == 3 ? formatted.squeeze(0) : formatted;
}

}  // namespace polycast_cpu
