// Autograd functions for matmuls and convolutions in float32, and for fused attention: fastest/autograd_functions.py and attention.py, in
// C++. They save the casts of the operands, so that either may be written before the backward.

#pragma once

#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "casting.h"
#include "conversions.h"

namespace {

// A call of linear, mm, addmm, a convolution or an attention.
struct RecordedCall {
  const c10::OperatorHandle& handle;
  torch::jit::Stack& arguments;
  size_t second;                            // of a matmul or convolution, the position of the weight, or of the second matrix
  const std::vector<c10::IValue>& dtypes;  // of an attention, those to compute the forward and the backward in
  const CastSpec spec;                      // to the fast dtype
  Tensor cast = {};                         // of the second operand, if the backward needs it
  const ScalarType fast = spec.dtype;
};

// Runs a backward: autocast is off, and so is autograd unless it records the backward. Holds the saved tensors.
struct BackwardScope {
  explicit BackwardScope(torch::autograd::AutogradContext* context) : saved(context->get_saved_variables()) {
    if (!at::GradMode::is_enabled()) {
      below_autograd.emplace();
    }
  }

  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  const torch::autograd::variable_list saved;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
};

class RecordedProduct : public torch::autograd::Function<RecordedProduct> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;
  enum Kind : int64_t { kLinear, kMatmul, kConvolution };
  static constexpr std::array<const char*, 4> kSettings = {"stride", "padding", "dilation", "groups"};

 public:
  static constexpr bool is_traceable = true;  // by compiled autograd

  // Compute a call. `first` is a cast if it is saved, and `second` a cast or a weight.
  static Tensor forward(
      Context* context, const RecordedCall& call, const Tensor& first, const Tensor& second, const std::optional<Tensor>& bias) {
    torch::jit::Stack& arguments = call.arguments;
    // linear has 3 arguments, convolutions 7, mm 2 and addmm 5.
    const Kind kind = arguments.size() == 3 ? kLinear : arguments.size() == 7 ? kConvolution : kMatmul;
    const bool is_convolution = kind == kConvolution;
    context->set_materialize_grads(false);
    context->save_for_backward(
        {is_convolution || second.requires_grad() ? first : Tensor(), call.cast});
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
    const BackwardScope scope(context);
    const Tensors& saved = scope.saved;
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

// An attention by torch's fused kernels for the CPU, of operands in the fast dtype.
class FusedAttention : public torch::autograd::Function<FusedAttention> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;
  static constexpr int64_t kFused = 1;  // torch.nn.attention.SDPBackend.FLASH_ATTENTION

 public:
  enum Position : size_t { kMask = 3, kDropout, kIsCausal, kScale, kGroups, kCount };
  static constexpr bool is_traceable = true;  // by compiled autograd

  // Compute a call; return an undefined tensor if torch would compute it by other kernels.
  static Tensor record(const RecordedCall& call) {
    const torch::jit::Stack& arguments = call.arguments;
    const Tensor query = arguments[0].toTensor(), key = arguments[1].toTensor(), value = arguments[2].toTensor();
    std::optional<Tensor> mask;
    if (arguments[kMask].isTensor() && arguments[kMask].toTensor().defined()) {
      mask = arguments[kMask].toTensor();
    }
    const int64_t choice = at::_fused_sdp_choice(
        query, key, value, mask, arguments[kDropout].toDouble(), arguments[kIsCausal].toBool(), arguments[kScale].toOptional<double>(),
        arguments[kGroups].toBool());
    return choice == kFused ? apply(call, query, key, value, mask ? std::optional(to_save(*mask, call)) : std::nullopt) : Tensor();
  }

  static Tensor forward(
      Context* context, const RecordedCall& call, const Tensor& query, const Tensor& key, const Tensor& value,
      const std::optional<Tensor>& mask) {
    const torch::jit::Stack& arguments = call.arguments;
    context->set_materialize_grads(false);
    context->saved_data["is_causal"] = arguments[kIsCausal];
    context->saved_data["scale"] = arguments[kScale];
    context->saved_data["dtype"] = call.dtypes[1];
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ScalarType dtype = call.dtypes[0].toScalarType();
    const auto [output, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        converted(query, dtype), converted(key, dtype), converted(value, dtype), /*dropout_p=*/0, arguments[kIsCausal].toBool(),
        mask ? std::optional(converted(*mask, dtype)) : std::nullopt, arguments[kScale].toOptional<double>());
    const Tensor result = converted(output, call.fast);
    context->save_for_backward({query, key, value, result, sums, mask.value_or(Tensor())});
    return result;
  }

  static Tensors backward(Context* context, Tensors gradients) {
    Tensors found(5);  // the first is that of the call, the last of the mask
    if (!gradients.front().defined()) {
      return found;
    }
    const BackwardScope scope(context);
    const Tensors& saved = scope.saved;
    auto& data = context->saved_data;
    const ScalarType dtype = data["dtype"].toScalarType();
    const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        converted(gradients.front(), dtype), converted(saved[0], dtype), converted(saved[1], dtype), converted(saved[2], dtype),
        converted(saved[3], dtype), saved[4], /*dropout_p=*/0, data["is_causal"].toBool(),
        saved[5].defined() ? std::optional(converted(saved[5], dtype)) : std::nullopt,
        data["scale"].toOptional<double>());
    const std::array<const Tensor*, 3> all{&of_query, &of_key, &of_value};
    for (size_t i = 0; i < all.size(); ++i) {
      if (context->needs_input_grad(i)) {
        found[i + 1] = converted(*all[i], saved[i].scalar_type());
      }
    }
    return found;
  }

 private:
  // Return a mask as numbers that are added, to save: a boolean one as 0 and -inf in the fast dtype. The backward needs the numbers that
  // the forward has added: where either has the fast dtype, they are rounded to it.
  static Tensor to_save(const Tensor& mask, const RecordedCall& call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (mask.scalar_type() == at::kBool) {
      return at::zeros_like(mask, mask.options().dtype(call.fast))
          .masked_fill_(mask.logical_not(), -std::numeric_limits<float>::infinity());
    }
    const bool rounds = std::any_of(
        call.dtypes.begin(), call.dtypes.end(), [&](const c10::IValue& each) { return each.toScalarType() == call.fast; });
    const Tensor rounded = rounds ? converted(mask, call.fast) : mask;
    // autograd saves no inference tensors, and torch saves a converted mask: this one may change
    return rounded.is_inference() || rounded.scalar_type() != call.fast ? rounded.clone() : rounded;
  }
};

// Compute a call that autograd records; return an undefined tensor if Python has to be asked.
Tensor record(RecordedCall call) {
  if (call.arguments.size() == FusedAttention::kCount) {
    return FusedAttention::record(call);
  }
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
  if (is_convolution || first.requires_grad()) {
    call.cast = call.spec.applies_to(second) ? cast(second, call.spec) : second;
    if (weight_of(second) == nullptr) {
      second = call.cast;  // the gradient of a weight keeps the weight's dtype
    }
  }
  return RecordedProduct::apply(call, first, second, bias);
}

}  // namespace
