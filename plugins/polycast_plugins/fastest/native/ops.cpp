// Ops that autograd records as one function each: matmuls and convolutions in float32, and fused attention; autograd_functions.py and
// attention.py of fastest, in C++. They save the casts of the operands, so that either may be written before the backward.
//
// The native engine calls them as operators of actions: with the arguments of torch's op, for a product the cast of the second operand, and
// the fast dtype. `is_weight`: whether the second operand is a weight, of which the gradient keeps the dtype.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "conversions.h"

namespace {

using at::ScalarType;
using at::Tensor;
using polycast::converted;
using Context = torch::autograd::AutogradContext;
using Tensors = torch::autograd::variable_list;

Tensor wide(const Tensor& tensor) { return tensor.defined() ? converted(tensor, at::kFloat) : tensor; }

std::optional<Tensor> wide(const std::optional<Tensor>& tensor) { return tensor ? std::optional(wide(*tensor)) : std::nullopt; }

// Runs a backward: autocast is off, and so is autograd unless it records the backward. Holds the saved tensors.
struct BackwardScope {
  explicit BackwardScope(Context* context) : saved(context->get_saved_variables()) {
    if (!at::GradMode::is_enabled()) {
      below_autograd.emplace();
    }
  }

  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  const Tensors saved;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
};

// A product of two operands. Its autograd function takes the operands, the bias, this, and settings.
struct Product {
  static constexpr size_t kArguments = 5;

  const Tensor &first, &second, &cast;  // the cast of the second
  std::optional<Tensor> bias;
  ScalarType fast;
  bool is_weight;
};

// Convert the gradient of the first operand to its dtype: that of the fast cast if it is saved.
Tensor as_first(const Tensor& gradient, const Tensor& saved) { return saved.defined() ? converted(gradient, saved.scalar_type()) : gradient; }

// Compute a product by an autograd function, of the cast of the first operand if the backward needs it.
template <class Function, class Settings>
Tensor record(const Product& product, bool saves_first, const Settings& settings) {
  return Function::apply(
      saves_first ? product.first.to(product.fast) : product.first, product.is_weight ? product.second : product.cast, product.bias, product,
      settings);
}

// beta * bias + alpha * (first @ second), or a linear.
struct Matmul {
  bool is_linear;
  at::Scalar beta = 1, alpha = 1;
};

class RecordedMatmul : public torch::autograd::Function<RecordedMatmul> {
 public:
  static constexpr bool is_traceable = true;  // by compiled autograd

  static Tensor forward(
      Context* context, const Tensor& first, const Tensor& second, const std::optional<Tensor>& bias, const Product& product,
      const Matmul& matmul) {
    context->set_materialize_grads(false);
    context->save_for_backward({second.requires_grad() ? first : Tensor(), product.first.requires_grad() ? product.cast : Tensor()});
    auto& data = context->saved_data;
    data["is_linear"] = matmul.is_linear;
    if (bias) {
      data["bias"] = bias->sizes();
      if (!matmul.is_linear) {
        data["beta"] = matmul.beta;
        data["alpha"] = matmul.alpha;
      }
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor left = wide(product.first), right = wide(product.second);
    const std::optional<Tensor> added = wide(product.bias);
    const Tensor result = matmul.is_linear ? at::linear(left, right, added)
        : added                            ? at::addmm(*added, left, right, matmul.beta, matmul.alpha)
        : left.dim() == 2                  ? left.mm(right)
                                           : left.matmul(right);
    return converted(result, product.fast);
  }

  static Tensors backward(Context* context, Tensors gradients) {
    Tensors found(Product::kArguments);
    if (!gradients.front().defined()) {
      return found;
    }
    const BackwardScope scope(context);
    const bool is_linear = context->saved_data["is_linear"].toBool();
    const bool of_first = context->needs_input_grad(0), of_second = context->needs_input_grad(1);
    const Tensor result = of_first || of_second ? wide(gradients.front()) : gradients.front();
    const Tensor first = wide(scope.saved[0]), second = wide(scope.saved[1]);
    if (of_first) {
      const Tensor other = is_linear ? second : second.t();
      found[0] = as_first(scaled(*context, "alpha", result.dim() == 2 ? result.mm(other) : result.matmul(other)), scope.saved[0]);
    }
    if (of_second) {
      const Tensor rows = as_matrix(first), columns = as_matrix(result);
      found[1] = scaled(*context, "alpha", is_linear ? columns.t().mm(rows) : rows.t().mm(columns));
    }
    const auto bias = context->saved_data.find("bias");
    if (bias != context->saved_data.end() && context->needs_input_grad(2)) {
      found[2] = scaled(*context, "beta", sum_to(result, bias->second.toIntVector()));
    }
    return found;
  }

 private:
  static Tensor as_matrix(const Tensor& tensor) { return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)}); }

  static Tensor scaled(Context& context, const char* name, Tensor tensor) {
    const auto factor = context.saved_data.find(name);
    const bool is_one = factor == context.saved_data.end() || factor->second.toScalar().equal(1);
    return is_one ? tensor : tensor.mul(factor->second.toScalar());
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

using Numbers = c10::List<int64_t>;

struct Convolution {
  const Numbers &stride, &padding, &dilation;
  int64_t groups;
};

class RecordedConvolution : public torch::autograd::Function<RecordedConvolution> {
 public:
  static constexpr bool is_traceable = true;  // by compiled autograd

  static Tensor forward(
      Context* context, const Tensor& x, const Tensor&, const std::optional<Tensor>&, const Product& product, const Convolution& settings) {
    context->set_materialize_grads(false);
    context->save_for_backward({x, product.cast});
    auto& data = context->saved_data;  // one by one: compiled autograd cannot hash a tuple of lists
    data["stride"] = settings.stride;
    data["padding"] = settings.padding;
    data["dilation"] = settings.dilation;
    data["groups"] = settings.groups;
    data["has_bias"] = product.bias.has_value();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const std::vector<int64_t> none(settings.padding.size());
    return converted(
        at::convolution(
            wide(product.first), wide(product.second), wide(product.bias), settings.stride.vec(), settings.padding.vec(),
            settings.dilation.vec(), /*transposed=*/false, none, settings.groups),
        product.fast);
  }

  static Tensors backward(Context* context, Tensors gradients) {
    Tensors found(Product::kArguments);
    if (!gradients.front().defined()) {
      return found;
    }
    const BackwardScope scope(context);
    auto& data = context->saved_data;
    const auto setting = [&](const char* name) { return data[name].toIntVector(); };
    const bool of_x = context->needs_input_grad(0), of_weight = context->needs_input_grad(1);
    Tensor result = gradients.front();
    if (of_x || of_weight) {
      result = wide(result);
      const std::vector<int64_t> padding = setting("padding"), none(padding.size());
      const auto [gradient_of_x, gradient_of_weight, _] = at::convolution_backward(
          result, wide(scope.saved[0]), wide(scope.saved[1]), std::nullopt, setting("stride"), padding, setting("dilation"),
          /*transposed=*/false, none, data["groups"].toInt(), {of_x, of_weight, false});
      found[0] = of_x ? as_first(gradient_of_x, scope.saved[0]) : Tensor();
      found[1] = of_weight ? gradient_of_weight : Tensor();
    }
    if (data["has_bias"].toBool() && context->needs_input_grad(2)) {
      std::vector<int64_t> dims{0};  // all but the channels
      for (int64_t dim = 2; dim < result.dim(); ++dim) {
        dims.push_back(dim);
      }
      found[2] = result.sum(dims, /*keepdim=*/false, at::kFloat);
    }
    return found;
  }
};

// The settings of an attention: its arguments that are no tensors, and the dtypes to compute its forward and its backward in.
struct Attention {
  bool is_causal;
  std::optional<double> scale;
  ScalarType fast, forward, backward;
};

// An attention by torch's fused kernels for the CPU, of operands in the fast dtype.
class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  static constexpr bool is_traceable = true;  // by compiled autograd

  static Tensor forward(
      Context* context, const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
      const Attention& settings) {
    context->set_materialize_grads(false);
    context->saved_data["is_causal"] = settings.is_causal;
    context->saved_data["scale"] = settings.scale;
    context->saved_data["dtype"] = settings.backward;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ScalarType dtype = settings.forward;
    const auto [output, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        converted(query, dtype), converted(key, dtype), converted(value, dtype), /*dropout_p=*/0, settings.is_causal,
        mask ? std::optional(converted(*mask, dtype)) : std::nullopt, settings.scale);
    const Tensor result = converted(output, settings.fast);
    context->save_for_backward({query, key, value, result, sums, mask.value_or(Tensor())});
    return result;
  }

  static Tensors backward(Context* context, Tensors gradients) {
    Tensors found(5);  // the last two of the mask and the settings
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
        found[i] = converted(*all[i], saved[i].scalar_type());
      }
    }
    return found;
  }

  // Return a mask as numbers that are added, to save: a boolean one as 0 and -inf in the fast dtype. The backward needs the numbers that
  // the forward has added: where either has the fast dtype, they are rounded to it.
  static Tensor to_save(const Tensor& mask, const Attention& settings) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (mask.scalar_type() == at::kBool) {
      return at::zeros_like(mask, mask.options().dtype(settings.fast))
          .masked_fill_(mask.logical_not(), -std::numeric_limits<float>::infinity());
    }
    const bool rounds = settings.forward == settings.fast || settings.backward == settings.fast;
    const Tensor rounded = rounds ? converted(mask, settings.fast) : mask;
    // autograd saves no inference tensors, and torch saves a converted mask: this one may change
    return rounded.is_inference() || rounded.scalar_type() != settings.fast ? rounded.clone() : rounded;
  }
};

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& cast, ScalarType fast, bool is_weight) {
  return record<RecordedMatmul>({x, weight, cast, bias, fast, is_weight}, weight.requires_grad(), Matmul{/*is_linear=*/true});
}

Tensor matmul(const Tensor& first, const Tensor& second, const Tensor& cast, ScalarType fast, bool is_weight) {
  return record<RecordedMatmul>({first, second, cast, std::nullopt, fast, is_weight}, second.requires_grad(), Matmul{/*is_linear=*/false});
}

Tensor addmm(
    const Tensor& bias, const Tensor& first, const Tensor& second, const at::Scalar& beta, const at::Scalar& alpha, const Tensor& cast,
    ScalarType fast, bool is_weight) {
  return record<RecordedMatmul>(
      {first, second, cast, bias, fast, is_weight}, second.requires_grad(), Matmul{/*is_linear=*/false, beta, alpha});
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Numbers& stride, const Numbers& padding,
    const Numbers& dilation, int64_t groups, const Tensor& cast, ScalarType fast, bool is_weight) {
  return record<RecordedConvolution>(
      {x, weight, cast, bias, fast, is_weight}, /*saves_first=*/true, Convolution{stride, padding, dilation, groups});
}

// Without dropout and groups: then torch computes it by other kernels.
Tensor attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double, bool is_causal,
    std::optional<double> scale, bool, ScalarType fast, ScalarType forward, ScalarType backward) {
  const Attention settings{is_causal, scale, fast, forward, backward};
  return FusedAttention::apply(query, key, value, mask ? std::optional(FusedAttention::to_save(*mask, settings)) : std::nullopt, settings);
}

}  // namespace

TORCH_LIBRARY(polycast_fastest, library) {
  const auto def_product = [&](const std::string& op, auto* function) {
    library.def((op + ", Tensor cast, ScalarType dtype, bool is_weight) -> Tensor").c_str(), function);
  };
  def_product("linear(Tensor x, Tensor weight, Tensor? bias", &linear);
  def_product("matmul(Tensor first, Tensor second", &matmul);
  def_product("addmm(Tensor bias, Tensor first, Tensor second, Scalar beta, Scalar alpha", &addmm);
  def_product(
      "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups", &convolution);
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool is_causal, float? scale, bool enable_gqa, "
      "ScalarType dtype, ScalarType forward, ScalarType backward) -> Tensor",
      &attention);
}
