// The functions of lookup.h as ops, which autograd records. They take a tensor twice: as the op's argument and in place of a weight's
// cast.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mish_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
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

// Return whether nothing but autograd and autocast would see an op on a tensor.
inline bool needs_only_autograd(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static constexpr c10::DispatchKeySet kTransparent{
      DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView, DispatchKey::AutogradFunctionality, DispatchKey::AutocastCPU};
  const auto& local = c10::impl::tls_local_dispatch_key_set();
  const auto keys = ((tensor.key_set() | local.included_) - local.excluded_) - kTransparent;
  return keys == c10::DispatchKeySet(DispatchKey::CPU);
}

template <typename Function>
class RecordedLookup : public torch::autograd::Function<RecordedLookup<Function>> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

 public:
  static at::Tensor forward(Context* context, const at::Tensor& x, at::ScalarType dtype) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor result = look_up<Function>(x, dtype);
    context->save_for_backward({saves_argument<Function> ? x : result});
    return result;
  }

  static Tensors backward(Context* context, Tensors gradients) {
    const at::Tensor &gradient = gradients.front(), saved = context->get_saved_variables().front();
    if (!gradient.defined()) {
      return {at::Tensor(), at::Tensor()};
    }
    if constexpr (saves_argument<Function>) {
      const bool is_alike = gradient.scalar_type() == saved.scalar_type() && gradient.strides() == saved.strides();
      if (!at::GradMode::is_enabled() && needs_only_autograd(gradient) && needs_only_autograd(saved) && is_alike) {
        return {look_up_gradient<Function>(gradient, saved), at::Tensor()};
      }
    }
    return {backward_of_torch<Function>(gradient, saved), at::Tensor()};
  }
};

// The kernels for the CPU, and for autograd.
template <typename Function>
struct Lookup {
  static at::Tensor compute(const at::Tensor& x, const at::Tensor&, at::ScalarType dtype) { return look_up<Function>(x, dtype); }
  static at::Tensor record(const at::Tensor& x, const at::Tensor&, at::ScalarType dtype) {
    return RecordedLookup<Function>::apply(x, dtype);
  }
};

template <>
struct Lookup<Gelu<false>> {
  static at::Tensor compute(const at::Tensor& x, c10::string_view approximate, const at::Tensor&, at::ScalarType dtype) {
    return approximate == "tanh" ? look_up<Gelu<true>>(x, dtype) : look_up<Gelu<false>>(x, dtype);
  }
  static at::Tensor record(const at::Tensor& x, c10::string_view approximate, const at::Tensor&, at::ScalarType dtype) {
    return approximate == "tanh" ? RecordedLookup<Gelu<true>>::apply(x, dtype) : RecordedLookup<Gelu<false>>::apply(x, dtype);
  }
};

template <typename Function>
void impl_lookup(torch::Library& library, const char* name, bool records) {
  library.impl(name, records ? torch::CppFunction(&Lookup<Function>::record) : torch::CppFunction(&Lookup<Function>::compute));
}

inline void impl_lookups(torch::Library& library, bool records) {
  impl_lookup<Gelu<false>>(library, "lookup_gelu", records);
  impl_lookup<Mish>(library, "lookup_mish", records);
  impl_lookup<Sigmoid>(library, "lookup_sigmoid", records);
  impl_lookup<Silu>(library, "lookup_silu", records);
  impl_lookup<Tanh>(library, "lookup_tanh", records);
}

}  // namespace polycast_cpu
