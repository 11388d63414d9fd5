// The results of the ops without their elements, for compilers. `Rest` is what follows the arguments of torch's op: prepacked
// tensors, the fast dtype and constants.
#pragma once

#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>

#include <optional>
#include <tuple>
#include <type_traits>

#include "convolution.h"
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

// `Padding` is numbers or a name.
template <int Axes, typename Padding, typename... Rest>
at::Tensor fake_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>&,
                     c10::SymIntArrayRef stride, Padding padding, c10::SymIntArrayRef dilation, c10::SymInt groups,
                     Rest... rest) {
  const at::ScalarType dtype = dtype_in(std::decay_t<Rest>(rest)...);
  const bool is_batch = x.dim() == Axes + 2;
  const at::Tensor images = is_batch ? x : x.unsqueeze(0);
  at::Tensor result;
  if constexpr (Axes == 1) {
    result = at::conv1d_symint(images.to(dtype), weight.to(dtype), {}, stride, padding, dilation, groups);
  } else {
    result = at::conv2d_symint(images.to(dtype), weight.to(dtype), {}, stride, padding, dilation, groups);
  }
  const at::MemoryFormat format = convolution_format<Axes>(with_height(images, Axes), with_height(weight, Axes));
  const at::Tensor formatted = with_height(result, Axes).contiguous(format);
  const at::Tensor out = Axes == 1 ? formatted.squeeze(-2) : formatted;
  return is_batch ? out : out.squeeze(0);
}

}  // namespace polycast_cpu
