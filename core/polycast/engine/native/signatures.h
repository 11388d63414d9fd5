// The ops with an unboxed entry point, which redispatch through torch's compiled functions. One entry point is compiled for each
// signature. An op that is not listed gets the boxed one, which is slower: tests/core/engine/test_native_engine.py.

#pragma once

#include <ATen/Operators.h>

namespace {

template <class... Ops>
struct OpList {};

}  // namespace

namespace at::_ops {

// Only in some versions of torch.
struct _foreach_mm;
struct _upsample_lanczos2d_aa;
struct cholesky;
struct qr;
struct linalg_matrix_sqrth;

// The ops of the built-in tables, and others that policies commonly name.
using UnboxedOps = ::OpList<
    _addmm_activation, _batch_norm_with_update, _chunk_cat, _convolution, _convolution_deprecated, _embedding_bag, _embedding_bag_forward_only,
    _foreach_lerp_List, _foreach_lerp_Scalar, _foreach_lerp_ScalarList, _foreach_lerp__List, _foreach_lerp__Scalar, _foreach_lerp__ScalarList,
    _foreach_mm, _grid_sampler_2d_cpu_fallback, _grouped_mm, _histogramdd_bin_edges, _histogramdd_from_bin_cts, _histogramdd_from_bin_tensors,
    _linalg_det, _linalg_slogdet, _linalg_solve_ex, _log_softmax_backward_data, _lu_with_info, _mps_convolution, _native_batch_norm_legit,
    _native_batch_norm_legit_no_stats, _native_batch_norm_legit_no_training, _native_multi_head_attention, _sample_dirichlet,
    _scaled_dot_product_flash_attention, _scaled_dot_product_flash_attention_for_cpu, _softmax_backward_data, _sparse_addmm, _sparse_mm_reduce_impl,
    _standard_gamma, _thnn_fused_gru_cell, _thnn_fused_lstm_cell, _upsample_bicubic2d_aa, _upsample_bilinear2d_aa, _upsample_lanczos2d_aa,
    _upsample_nearest_exact1d, _upsample_nearest_exact2d, _upsample_nearest_exact3d, _weight_norm_interface, abs, acos, adaptive_avg_pool3d,
    adaptive_max_pool3d, add_Tensor, addbmm, addbmm_, addcdiv, addcmul, addmm, addmm_, addmv, addmv_, addr, amax, amin, asin, atan2, avg_pool3d,
    baddbmm, baddbmm_, batch_norm, bilinear, binary_cross_entropy, binary_cross_entropy_with_logits, binomial, bmm, cat, cdist, chain_matmul,
    cholesky, cholesky_inverse, cholesky_solve, clamp, complex, conv1d, conv1d_padding, conv2d, conv2d_padding, conv3d, conv3d_padding, conv_tbc,
    conv_transpose1d, conv_transpose2d_input, conv_transpose3d_input, convolution, cosh, cosine_embedding_loss, cosine_similarity, cross,
    cross_entropy_loss, ctc_loss_IntList, ctc_loss_Tensor, cudnn_convolution, cudnn_convolution_transpose, cumprod, cumsum, dist, div_Tensor, dot,
    dropout, einsum, embedding, erfinv, exp, expm1, fake_quantize_per_channel_affine_cachemask, fake_quantize_per_tensor_affine, fft_fft, fft_fft2,
    fft_fftn, fft_hfft, fft_hfft2, fft_hfftn, fft_ifft, fft_ifft2, fft_ifftn, fft_ihfft, fft_ihfft2, fft_ihfftn, fft_irfft, fft_irfft2, fft_irfftn,
    fft_rfft, fft_rfft2, fft_rfftn, fractional_max_pool2d, fractional_max_pool3d, frobenius_norm_dim, gelu, geqrf, grid_sampler, grid_sampler_2d,
    grid_sampler_3d, group_norm, gru_cell, heaviside, heaviside_, hinge_embedding_loss, histogram_bin_ct, histogram_bins_tensor, hspmm, huber_loss,
    index_add, index_add_, index_copy, index_copy_, index_put, index_put_, index_reduce, index_reduce_, instance_norm, inverse, isclose,
    isin_Tensor_Tensor, kl_div, l1_loss, layer_norm, leaky_relu, lerp_Scalar, lerp_Tensor, lerp__Scalar, lerp__Tensor, linalg_cholesky,
    linalg_cholesky_ex, linalg_cond, linalg_cond_p_str, linalg_cross, linalg_eig, linalg_eigh, linalg_eigvals, linalg_eigvalsh,
    linalg_householder_product, linalg_inv, linalg_inv_ex, linalg_ldl_factor, linalg_ldl_factor_ex, linalg_ldl_solve, linalg_lstsq, linalg_lu,
    linalg_lu_factor, linalg_lu_factor_ex, linalg_lu_solve, linalg_matrix_norm, linalg_matrix_norm_str_ord, linalg_matrix_rank,
    linalg_matrix_rank_atol_rtol_float, linalg_matrix_rank_atol_rtol_tensor, linalg_matrix_rank_tol_tensor, linalg_matrix_sqrth, linalg_multi_dot,
    linalg_pinv_atol_rtol_tensor, linalg_qr, linalg_slogdet, linalg_solve, linalg_solve_ex, linalg_solve_triangular, linalg_svd, linalg_svdvals,
    linalg_tensorinv, linalg_tensorsolve, linalg_vander, linalg_vecdot, linalg_vector_norm, linear, log, log10, log1p, log2, log_softmax_int, logdet,
    logsumexp, lstm_cell, lu_solve, margin_ranking_loss, masked_scatter, masked_scatter_, matmul, max_pool3d, max_unpool2d, max_unpool3d, maximum,
    mean, mean_dim, meshgrid, meshgrid_indexing, minimum, mkldnn_rnn_layer, mm, mse_loss, mul_Tensor, multi_margin_loss, multilabel_margin_loss,
    multilabel_margin_loss_forward, mv, nanquantile, nanquantile_scalar, native_batch_norm, native_group_norm, native_layer_norm, neg, nll_loss,
    nll_loss2d, norm_Scalar, norm_ScalarOpt_dim, nuclear_norm, nuclear_norm_dim, orgqr, ormqr, pdist, pinverse, poisson_nll_loss, polar, pow_Scalar,
    pow_Tensor_Scalar, pow_Tensor_Tensor, prelu, prod, prod_dim_int, put, put_, qr, quantile, quantile_scalar, reciprocal, reflection_pad1d,
    reflection_pad2d, relu, renorm, replication_pad1d, replication_pad2d, replication_pad3d, rms_norm, rnn_relu_cell, rnn_tanh_cell, rsqrt,
    scaled_dot_product_attention, scatter__reduce, scatter__src, scatter_add, scatter_add_, scatter_reduce, scatter_reduce__two, scatter_reduce_two,
    scatter_src, sigmoid, silu, sinh, smooth_l1_loss, soft_margin_loss, softmax_int, softplus, sparse_sampled_addmm, special_airy_ai,
    special_bessel_j0, special_bessel_j1, special_bessel_y0, special_bessel_y1, special_chebyshev_polynomial_t, special_chebyshev_polynomial_u,
    special_chebyshev_polynomial_v, special_chebyshev_polynomial_w, special_erfcx, special_hermite_polynomial_h, special_hermite_polynomial_he,
    special_laguerre_polynomial_l, special_legendre_polynomial_p, special_log_ndtr, special_modified_bessel_i0, special_modified_bessel_i1,
    special_modified_bessel_k0, special_modified_bessel_k1, special_ndtri, special_scaled_modified_bessel_k0, special_scaled_modified_bessel_k1,
    special_shifted_chebyshev_polynomial_t, special_shifted_chebyshev_polynomial_u, special_shifted_chebyshev_polynomial_v,
    special_shifted_chebyshev_polynomial_w, special_spherical_bessel_j0, special_zeta, sqrt, square, sspaddmm, stack, std, stft, stft_center,
    sub_Tensor, sum, sum_dim_IntList, svd, tan, tanh, tensordot, trace, triangular_solve, triplet_margin_loss, upsample_bicubic2d,
    upsample_bilinear2d, upsample_linear1d, upsample_nearest1d, upsample_nearest2d, upsample_nearest3d, upsample_trilinear3d, var, vdot,
    view_as_complex, where_self>;

}  // namespace at::_ops
