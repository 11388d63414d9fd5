// The floating-point operations of matmuls, convolutions and attention, and the rows of their activations, by the sizes of their inputs.
//
// A product and a sum are two operations, as in torch.utils.flop_counter. Masks save none.

#pragma once

#include <string_view>

#include "counts.h"
#include "values.h"

namespace {

using Arguments = c10::ArrayRef<const c10::IValue>;

// Return an argument if it is a floating-point tensor with sizes, else null.
const Tensor* floats(Arguments arguments, size_t position) {
  if (position >= arguments.size() || !arguments[position].isTensor()) {
    return nullptr;
  }
  const Tensor& tensor = arguments[position].toTensor();
  static constexpr c10::DispatchKeySet kWithoutSizes{DispatchKey::NestedTensor, DispatchKey::Sparse, DispatchKey::SparseCsr};
  const bool has_sizes = tensor.defined() && has_known_sizes(tensor) && !tensor.key_set().has_any(kWithoutSizes);
  return has_sizes && (tensor.is_floating_point() || tensor.is_complex()) ? &tensor : nullptr;
}

// Return a size, counted from the last one, which is 1; 1 if there are fewer dimensions.
double size(const Tensor& tensor, int64_t from_end) {
  return tensor.dim() < from_end ? 1.0 : static_cast<double>(tensor.size(-from_end));
}

double elements(const Tensor& tensor) { return static_cast<double>(tensor.numel()); }

// Return the number of elements for each index of the first dimension.
double elements_of_each(const Tensor& tensor) {
  return tensor.dim() == 0 || tensor.numel() == 0 ? 0 : elements(tensor) / static_cast<double>(tensor.size(0));
}

// The ops of a polycast.DeviceProfile.
constexpr const char *kLinear = "linear", *kMatmul = "matmul", *kBmm = "bmm", *kConv2d = "conv2d", *kAttention = "scaled_dot_product_attention";

// Return the number of rows, over all dimensions but the last.
double rows_of(const Tensor& tensor) { return tensor.numel() == 0 ? 0 : elements(tensor) / size(tensor, 1); }

// The arguments `a` and `b`: [..., M, K] by [..., K, N], or by a vector. If only `a` has a dimension of groups, each group takes a part of
// the columns.
template <size_t a, size_t b>
Flops product(Arguments arguments) {
  const Tensor *const left = floats(arguments, a), *const right = floats(arguments, b);
  if (left == nullptr || right == nullptr) {
    return {};
  }
  if (right->dim() < 2) {
    return {2 * elements(*left), 0, kMatmul, 1};
  }
  const bool groups_take_parts = left->dim() == 3 && right->dim() == 2;
  const double flops = 2 * (groups_take_parts ? elements_of_each(*left) : elements(*left)) * size(*right, 1);
  const bool is_batch = left->dim() == 3 || right->dim() == 3;
  return {flops, 0, is_batch ? kBmm : kMatmul, size(*left, 2)};
}

// matmul(a, b), with broadcast batches
Flops broadcast_product(Arguments arguments) {
  const Tensor *const left = floats(arguments, 0), *const right = floats(arguments, 1);
  if (left == nullptr || right == nullptr) {
    return {};
  }
  double batches = 1;
  for (int64_t from_end = 3; from_end <= std::max(left->dim(), right->dim()); ++from_end) {
    const double of_left = size(*left, from_end), of_right = size(*right, from_end);
    batches *= of_left == 1 ? of_right : of_left;
  }
  const double flops = 2 * batches * size(*left, 2) * size(*left, 1) * (right->dim() < 2 ? 1 : size(*right, 1));
  if (right->dim() > 2) {
    return {flops, 0, kBmm, size(*left, 2)};
  }
  return {flops, 0, kMatmul, right->dim() < 2 ? 1 : rows_of(*left)};
}

// linear(x, weight [features, terms])
Flops linear(Arguments arguments) {
  const Tensor *const x = floats(arguments, 0), *const weight = floats(arguments, 1);
  return x == nullptr || weight == nullptr ? Flops() : Flops{2 * elements(*x) * size(*weight, 2), 0, kLinear, rows_of(*x)};
}

// conv2d(x, weight, ...): each output element is a sum over the weights of its channel
Flops convolution(Arguments arguments) {
  const Tensor *const x = floats(arguments, 0), *const weight = floats(arguments, 1);
  if (x == nullptr || weight == nullptr || weight->numel() == 0) {
    return {};
  }
  return {0, 2 * elements_of_each(*weight), kConv2d, 0, 1 / static_cast<double>(weight->size(0))};
}

// conv_transpose2d(x, weight, ...): each input element is multiplied by the weights of its channel
Flops transposed_convolution(Arguments arguments) {
  const Tensor *const x = floats(arguments, 0), *const weight = floats(arguments, 1);
  return x == nullptr || weight == nullptr ? Flops() : Flops{2 * elements(*x) * elements_of_each(*weight)};
}

bool is_set(Arguments arguments, size_t position) {
  return position < arguments.size() && arguments[position].isBool() && arguments[position].toBool();
}

// convolution(x, weight, bias, stride, padding, dilation, transposed, ...)
Flops any_convolution(Arguments arguments) {
  return is_set(arguments, 6) ? transposed_convolution(arguments) : convolution(arguments);
}

// conv_tbc(x, weight [width, channels, features], ...)
Flops convolution_tbc(Arguments arguments) {
  const Tensor *const x = floats(arguments, 0), *const weight = floats(arguments, 1);
  return x == nullptr || weight == nullptr ? Flops() : Flops{0, 2 * size(*weight, 3) * size(*weight, 2)};
}

// convolution_backward(gradient, x, weight, biases, stride, padding, dilation, transposed, output_padding, groups, wanted): the gradients
// of x and of the weight each take as many as the forward
Flops convolution_backward(Arguments arguments) {
  const Tensor *const gradient = floats(arguments, 0), *const x = floats(arguments, 1), *const weight = floats(arguments, 2);
  if (gradient == nullptr || x == nullptr || weight == nullptr || arguments.size() < 11 || !arguments[10].isBoolList()) {
    return {};
  }
  const auto wanted = arguments[10].toBoolList();
  const double times = wanted.size() < 2 ? 0 : static_cast<double>(wanted[0]) + static_cast<double>(wanted[1]);
  return {2 * times * elements(is_set(arguments, 7) ? *x : *gradient) * elements_of_each(*weight)};
}

// Queries, keys and values from argument `q` on, [..., length, features]; the numbers of products over the features of queries and values.
template <size_t q, int of_queries, int of_values>
Flops attention(Arguments arguments) {
  const Tensor *const queries = floats(arguments, q), *const keys = floats(arguments, q + 1), *const values = floats(arguments, q + 2);
  if (queries == nullptr || keys == nullptr || values == nullptr || queries->numel() == 0) {
    return {};
  }
  const double rows = elements(*queries) / size(*queries, 1);
  const double flops = 2 * rows * size(*keys, 2) * (of_queries * size(*queries, 1) + of_values * size(*values, 1));
  return q == 0 ? Flops{flops, 0, kAttention, size(*queries, 2)} : Flops{flops};
}

// _native_multi_head_attention(queries, keys, values, features, heads, weight of all three, bias, weight of the output, ...)
Flops fused_attention(Arguments arguments) {
  const Tensor *const into = floats(arguments, 5), *const out = floats(arguments, 7);
  Flops flops{attention<0, 1, 1>(arguments).fixed};
  if (flops.fixed == 0 || into == nullptr || out == nullptr) {
    return {};
  }
  for (const size_t position : {0, 1, 2}) {
    const Tensor& given = *floats(arguments, position);
    flops.fixed += 2 * elements(given) / size(given, 1) * elements(*into) / 3;
  }
  const Tensor& queries = *floats(arguments, 0);
  flops.fixed += 2 * elements(queries) / size(queries, 1) * elements(*out);
  return flops;
}

// The fused ops of a recurrent layer, with the weights from argument `first` on or in a list there: each row of x is multiplied by each
// matrix. The layers of other devices call linear for their weights.
template <size_t first, size_t count>
Flops recurrent(Arguments arguments) {
  const Tensor* const x = floats(arguments, 0);
  if (x == nullptr || x->numel() == 0 || arguments.size() < first + count) {
    return {};
  }
  double weights = 0;
  for (const c10::IValue& argument : arguments.slice(first, count)) {
    each_tensor(argument, [&weights](const Tensor& tensor) {
      if (has_known_sizes(tensor) && tensor.dim() == 2) {
        weights += elements(tensor);
      }
    });
  }
  return {2 * elements(*x) / size(*x, 1) * weights};
}

// Return the formula of an op, by its name without the overload; null: it is not a matmul, or calls matmuls.
FlopFormula formula_of(std::string_view name) {
  static constexpr std::pair<std::string_view, FlopFormula> kFormulas[] = {
      {"mm", &product<0, 1>}, {"bmm", &product<0, 1>}, {"mv", &product<0, 1>}, {"_scaled_mm", &product<0, 1>},
      {"_grouped_mm", &product<0, 1>}, {"_scaled_grouped_mm", &product<0, 1>},
      {"addmm", &product<1, 2>}, {"_addmm_activation", &product<1, 2>}, {"addmm_", &product<1, 2>}, {"baddbmm", &product<1, 2>},
      {"baddbmm_", &product<1, 2>}, {"addbmm", &product<1, 2>}, {"addbmm_", &product<1, 2>}, {"addmv", &product<1, 2>},
      {"addmv_", &product<1, 2>},
      {"matmul", &broadcast_product}, {"linear", &linear},
      {"conv1d", &convolution}, {"conv2d", &convolution}, {"conv3d", &convolution}, {"conv_tbc", &convolution_tbc},
      {"conv_transpose1d", &transposed_convolution}, {"conv_transpose2d", &transposed_convolution},
      {"conv_transpose3d", &transposed_convolution},
      {"convolution", &any_convolution}, {"_convolution", &any_convolution}, {"convolution_overrideable", &any_convolution},
      {"convolution_backward", &convolution_backward},
      {"scaled_dot_product_attention", &attention<0, 1, 1>}, {"_native_multi_head_attention", &fused_attention},
      {"mkldnn_rnn_layer", &recurrent<1, 4>}, {"_cudnn_rnn", &recurrent<1, 1>}, {"miopen_rnn", &recurrent<1, 1>},
      {"_lstm_mps", &recurrent<2, 1>}};
  const auto without_prefix = [&name](std::string_view prefix) {
    const bool has_it = name.substr(0, prefix.size()) == prefix;
    name.remove_prefix(has_it ? prefix.size() : 0);
    return has_it;
  };
  const auto without_suffix = [&name](std::string_view suffix) {
    const bool has_it = name.size() >= suffix.size() && name.substr(name.size() - suffix.size()) == suffix;
    name.remove_suffix(has_it ? suffix.size() : 0);
    return has_it;
  };
  if (without_prefix("polycast::low_bit_aten_")) {  // an op in compiled code, named with its overload
    without_suffix("_padding");
  } else if (!without_prefix("aten::")) {
    return nullptr;
  }
  if (without_prefix("_scaled_dot_product_")) {
    return without_suffix("_backward") ? &attention<1, 3, 2> : &attention<0, 1, 1>;
  }
  for (const auto& [known, formula] : kFormulas) {
    if (name == known) {
      return formula;
    }
  }
  return nullptr;
}

}  // namespace
