// Products that autograd records, computed in float32 forward and backward: as by engine/fastest/functions.py, without Python.
//
// Save the activation in the fast dtype, and the weight as it is.

#pragma once

#include <ATen/ops/convolution_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include "casting.h"
#include "conversions.h"

namespace {

// A call of linear, mm, addmm or a convolution, with the position of the weight, or of the second matrix.
struct RecordedCall {
  const c10::OperatorHandle& handle;
  torch::jit::Stack& arguments;
  size_t second;
  ScalarType fast;
};

class RecordedProduct : public torch::autograd::Function<RecordedProduct> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;
  enum Kind : int64_t { kLinear, kMatmul, kConvolution };
  static constexpr std::array<const char*, 4> kSettings = {"stride", "padding", "dilation", "groups"};

 public:
  static constexpr bool is_traceable = true;  // by compiled autograd

  // Compute a call. `first` and `second` are what is saved.
  static Tensor forward(
      Context* context, const RecordedCall& call, const Tensor& first, const Tensor& second, const std::optional<Tensor>& bias) {
    torch::jit::Stack& arguments = call.arguments;
    const Kind kind = arguments.size() == 3 ? kLinear : arguments.size() == 7 ? kConvolution : kMatmul;
    const bool is_convolution = kind == kConvolution;
    context->set_materialize_grads(false);
    context->save_for_backward(
        {is_convolution || second.requires_grad() ? first : Tensor(), is_convolution || first.requires_grad() ? second : Tensor()});
    auto& data = context->saved_data;
    data["kind"] = static_cast<int64_t>(kind);
    if (bias) {
      data["bias"] = bias->sizes();
    }
    if (is_convolution) {
      for (size_t i = 0; i < kSettings.size(); ++i) {  // one by one: compiled autograd cannot hash a tuple of lists
        data[kSettings[i]] = arguments[3 + i];
      }
    } else if (call.second == 2) {
      data["beta"] = arguments[3];
      data["alpha"] = arguments[4];
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (c10::IValue& argument : arguments) {
      if (argument.isTensor() && argument.toTensor().defined()) {
        argument = converted(argument.toTensor(), at::kFloat);
      }
    }
    call.handle.callBoxed(arguments);
    return converted(arguments.back().toTensor(), call.fast);
  }

  static Tensors backward(Context* context, Tensors gradients) {
    Tensors found(4);  // the first is that of the call
    const Tensor& gradient = gradients.front();
    if (!gradient.defined()) {
      return found;
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensors saved = context->get_saved_variables();
    std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
    if (!at::GradMode::is_enabled()) {
      below_autograd.emplace();
    }
    const bool of_first = context->needs_input_grad(0), of_second = context->needs_input_grad(1);
    const auto kind = static_cast<Kind>(context->saved_data["kind"].toInt());
    const auto wide = [](const Tensor& tensor) { return tensor.defined() ? converted(tensor, at::kFloat) : tensor; };
    Tensor result = gradient;
    if (of_first || of_second) {
      result = wide(gradient);
      const Tensor first = wide(saved[0]), second = wide(saved[1]);
      if (kind == kConvolution) {
        std::tie(found[1], found[2]) = of_convolution(*context, result, first, second, of_first, of_second);
      } else {
        if (of_first) {
          const Tensor other = kind == kLinear ? second : second.t();
          found[1] = scaled(*context, "alpha", result.dim() == 2 ? result.mm(other) : result.matmul(other));
        }
        if (of_second) {
          const Tensor rows = as_matrix(first), columns = as_matrix(result);
          found[2] = scaled(*context, "alpha", kind == kLinear ? columns.t().mm(rows) : rows.t().mm(columns));
        }
      }
    }
    if (found[1].defined() && saved[0].defined()) {
      found[1] = converted(found[1], saved[0].scalar_type());
    }
    const auto bias = context->saved_data.find("bias");
    if (bias != context->saved_data.end() && context->needs_input_grad(2)) {
      const std::vector<int64_t> size = bias->second.toIntVector();
      found[3] = kind == kConvolution ? sum_of_channels(result) : scaled(*context, "beta", sum_to(result, size));
    }
    return found;
  }

 private:
  static Tensor as_matrix(const Tensor& tensor) { return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)}); }

  static Tensor scaled(Context& context, const char* name, Tensor tensor) {
    const auto factor = context.saved_data.find(name);
    if (factor == context.saved_data.end() || factor->second.toScalar().equal(1)) {
      return tensor;
    }
    return tensor.mul(factor->second.toScalar());
  }

  static std::tuple<Tensor, Tensor> of_convolution(
      Context& context, const Tensor& result, const Tensor& x, const Tensor& weight, bool of_x, bool of_weight) {
    const auto setting = [&](const char* name) { return context.saved_data[name].toIntVector(); };
    const std::vector<int64_t> padding = setting("padding"), none(padding.size());
    const auto [gradient_of_x, gradient_of_weight, _] = at::convolution_backward(
        result, x, weight, std::nullopt, setting("stride"), padding, setting("dilation"), /*transposed=*/false, none,
        context.saved_data["groups"].toInt(), {of_x, of_weight, false});
    return {of_x ? gradient_of_x : Tensor(), of_weight ? gradient_of_weight : Tensor()};
  }

  // Sum the gradient of images over all but the channels, in float32.
  static Tensor sum_of_channels(const Tensor& gradient) {
    std::vector<int64_t> dims{0};
    for (int64_t dim = 2; dim < gradient.dim(); ++dim) {
      dims.push_back(dim);
    }
    return gradient.sum(dims, /*keepdim=*/false, at::kFloat);
  }

  // Sum a gradient to a size that was broadcast to its own, in float32.
  static Tensor sum_to(const Tensor& gradient, at::IntArrayRef size) {
    std::vector<int64_t> dims;
    const int64_t missing = gradient.dim() - static_cast<int64_t>(size.size());
    for (int64_t dim = 0; dim < gradient.dim(); ++dim) {
      if (dim < missing || (size[dim - missing] == 1 && gradient.size(dim) != 1)) {
        dims.push_back(dim);
      }
    }
    return dims.empty() ? gradient.to(at::kFloat) : gradient.sum(dims, /*keepdim=*/false, at::kFloat).reshape(size);
  }
};

// Compute a call that autograd records.
Tensor record(const RecordedCall& call) {
  Tensor first = call.arguments[call.second - 1].toTensor(), second = call.arguments[call.second].toTensor();
  const size_t at = call.second == 2 ? 0 : 2;
  std::optional<Tensor> bias;
  if (at < call.arguments.size() && call.arguments[at].isTensor() && call.arguments[at].toTensor().defined()) {
    bias = call.arguments[at].toTensor();
  }
  const bool is_convolution = call.arguments.size() == 7;
  if (is_convolution || second.requires_grad()) {
    first = first.to(call.fast);
  }
  if ((is_convolution || first.requires_grad()) && weight_of(second) == nullptr) {
    second = second.to(call.fast);
  }
  return RecordedProduct::apply(call, first, second, bias);
}

}  // namespace
