// The C++ signatures of torch's ops, for kernels that are called without a stack.
//
// Owns nothing. Locks: none. What an op's kernels are declared with follows from the types in its schema, so that one op stands
// for all with the same: but for lists of tensors, which some take as ITensorListRef. torch refuses a kernel whose signature
// is another than that of the op's own.

#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace {  // all is one unit, binding.cpp

template <class... Ops>
struct OpList {};

// One op of each signature that is in the built-in tables. Those whose ops take far longer than a stack are not here.
using OpOfEachSignature = OpList<
    // products and convolutions
    at::_ops::mm,
    at::_ops::linear,
    at::_ops::addmm,
    at::_ops::_addmm_activation,
    at::_ops::linalg_vecdot,
    at::_ops::conv1d,
    at::_ops::conv1d_padding,
    at::_ops::conv_transpose1d,
    at::_ops::conv_tbc,
    at::_ops::_convolution_deprecated,
    at::_ops::_convolution,
    at::_ops::convolution,
    at::_ops::scaled_dot_product_attention,
    at::_ops::linalg_multi_dot,
    // elementwise, and reductions
    at::_ops::trace,
    at::_ops::pow_Tensor_Scalar,
    at::_ops::pow_Scalar,
    at::_ops::addcmul,
    at::_ops::dist,
    at::_ops::prod,
    at::_ops::prod_dim_int,
    at::_ops::sum_dim_IntList,
    at::_ops::logsumexp,
    at::_ops::softmax_int,
    at::_ops::cdist,
    at::_ops::softplus,
    at::_ops::fake_quantize_per_tensor_affine,
    // normalization and recurrent cells
    at::_ops::layer_norm,
    at::_ops::native_layer_norm,
    at::_ops::group_norm,
    at::_ops::rms_norm,
    at::_ops::gru_cell,
    // pooling, padding and sampling
    at::_ops::adaptive_avg_pool3d,
    at::_ops::adaptive_max_pool3d,
    at::_ops::avg_pool3d,
    at::_ops::max_pool3d,
    at::_ops::max_unpool2d,
    at::_ops::max_unpool3d,
    at::_ops::fractional_max_pool2d,
    at::_ops::grid_sampler,
    at::_ops::upsample_nearest1d,
    at::_ops::upsample_nearest2d,
    at::_ops::upsample_bilinear2d,
    // losses
    at::_ops::binary_cross_entropy,
    at::_ops::binary_cross_entropy_with_logits,
    at::_ops::cross_entropy_loss,
    at::_ops::ctc_loss_IntList,
    at::_ops::hinge_embedding_loss,
    at::_ops::huber_loss,
    at::_ops::kl_div,
    at::_ops::margin_ranking_loss,
    at::_ops::multi_margin_loss,
    at::_ops::nll_loss,
    // linear algebra
    at::_ops::linalg_cholesky,
    at::_ops::linalg_cholesky_ex,
    at::_ops::_lu_with_info,
    at::_ops::linalg_inv_ex,
    at::_ops::linalg_qr,
    at::_ops::geqrf,
    at::_ops::lu_solve,
    at::_ops::linalg_solve,
    at::_ops::fft_fft,
    at::_ops::fft_fft2,
    at::_ops::fft_fftn,
    // lists of tensors, and their like
    at::_ops::cat,
    at::_ops::stack,
    at::_ops::index_copy>;

// The types in a schema, in one line; empty where they do not tell the signature.
std::string signature_of(const c10::OperatorHandle& handle) {
  std::string types;
  for (const auto& argument : handle.schema().arguments()) {
    const std::string type = argument.real_type()->str();
    if (type.starts_with("Tensor[") || type.starts_with("Tensor?[")) {
      return "";
    }
    types += type + " ";
  }
  for (const auto& value : handle.schema().returns()) {
    types += "-> " + value.real_type()->str();
  }
  return types;
}

}  // namespace
