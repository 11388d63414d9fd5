// The functions of lookup.h as ops, which autograd records. They take a tensor twice: as the op's argument and in place of a weight's
// cast.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mish_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lookup.h"

namespace polycast_cpu {

// Compute the backward of torch's op from the gradient and what is saved, for any tensors. Autograd can record it.
template <typename Function>
at::Tensor backward_of_torch(const at::Tensor& gradient, const at::Tensor& saved) {
  const bool records = at::GradMode::is_enabled();  // torch's backwards of silu and mish have no derivative
  if constexpr (std::is_same_v<Function, Silu>) {
    if (records) {
      const at::Tensor sigmoid = at::sigmoid(saved);
      return gradient * sigmoid * (1 + saved * (1 - sigmoid));
    }
    return at::silu_backward(gradient, saved);
  } else if constexpr (std::is_same_v<Function, Mish>) {
    if (records) {
      const at::Tensor tanh = at::tanh(at::softplus(saved));
      return gradient * (tanh + saved * at::sigmoid(saved) * (1 - tanh * tanh));
    }
    return at::mish_backward(gradient, saved);
  } else if constexpr (std::is_same_v<Function, Sigmoid>) {
    return at::sigmoid_backward(gradient, saved);
  } else if constexpr (std::is_same_v<Function, Tanh>) {
    return at::tanh_backward(gradient, saved);
  } else {
    return at::gelu_backward(gradient, saved, Function::kApproximate);
  }
}

// Whether torch's backward takes the argument, not the result.
template <typename Function>
constexpr bool saves_argument = !std::is_same_v<Function, Sigmoid> && !std::is_same_v<Function, Tanh>;

// Return torch's op for any tensor.
template <typename Function>
at::Tensor of_torch(const at::Tensor& x) {
  if constexpr (std::is_same_v<Function, Silu>) {
    return at::silu(x);
  } else if constexpr (std::is_same_v<Function, Mish>) {
    return at::mish(x);
  } else if constexpr (std::is_same_v<Function, Sigmoid>) {
    return at::sigmoid(x);
  } else if constexpr (std::is_same_v<Function, Tanh>) {
    return at::tanh(x);
  } else {
    return at::gelu(x, Function::kApproximate);
  }
}

// Return whether the tables apply to a tensor: dense, bfloat16 or float16, on the CPU, without a forward-mode tangent, and nothing
// besides autograd and autocast intercepts its ops.
inline bool can_look_up(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static constexpr c10::DispatchKeySet kTransparent{
      DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView, DispatchKey::AutogradFunctionality, DispatchKey::AutocastCPU};
  const auto& local = c10::impl::tls_local_dispatch_key_set();
  const auto keys = ((tensor.key_set() | local.included_) - local.excluded_) - kTransparent;
  return keys == c10::DispatchKeySet(DispatchKey::CPU) && (tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf) &&
      tensor.is_non_overlapping_and_dense() && !tensor._fw_grad(/*level=*/0).defined();
}

template <typename Function>
class RecordedLookup : public torch::autograd::Function<RecordedLookup<Function>> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

 public:
  static at::Tensor forward(Context* context, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor result = look_up<Function>(x);
    context->save_for_backward({saves_argument<Function> ? x : result});
    return result;
  }

  static Tensors backward(Context* context, Tensors gradients) {
    const at::Tensor &gradient = gradients.front(), saved = context->get_saved_variables().front();
    if (!gradient.defined()) {
      return {at::Tensor()};
    }
    if constexpr (saves_argument<Function>) {
      const bool is_alike = gradient.scalar_type() == saved.scalar_type() && gradient.sizes() == saved.sizes() &&
          gradient.strides() == saved.strides();
      if (!at::GradMode::is_enabled() && is_alike && can_look_up(gradient) && can_look_up(saved)) {
        return {look_up_gradient<Function>(gradient, saved)};
      }
    }
    return {backward_of_torch<Function>(gradient, saved)};
  }
};

// Compute a function, by the CPU's kernel or by that for autograd. Tensors to which no table applies are left to torch.
template <typename Function>
at::Tensor apply(const at::Tensor& x, bool records) {
  if (!can_look_up(x)) {
    return of_torch<Function>(x);
  }
  return records ? RecordedLookup<Function>::apply(x) : look_up<Function>(x);
}

template <typename Function, bool records>
at::Tensor lookup(const at::Tensor& x, const at::Tensor&, at::ScalarType) {
  return apply<Function>(x, records);
}

template <bool records>
at::Tensor lookup_gelu(const at::Tensor& x, c10::string_view approximate, const at::Tensor&, at::ScalarType) {
  if (approximate == "tanh") {
    return apply<Gelu<true>>(x, records);
  }
  return approximate == "none" ? apply<Gelu<false>>(x, records) : at::gelu(x, approximate);
}

template <bool records>
void impl_lookups(torch::Library& library) {
  library.impl("lookup_gelu", lookup_gelu<records>);
  library.impl("lookup_mish", lookup<Mish, records>);
  library.impl("lookup_sigmoid", lookup<Sigmoid, records>);
  library.impl("lookup_silu", lookup<Silu, records>);
  library.impl("lookup_tanh", lookup<Tanh, records>);
}

}  // namespace polycast_cpu
