"""Sample arguments of the ops of torch's tables, by op name."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch


class Maker(Protocol):
    """Makes the tensors of a sample, on the device under test."""

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return a float32 tensor with values between 0.1 and 0.9."""

    def spd(self, size: int) -> torch.Tensor:
        """Return a symmetric, positive definite float32 matrix."""

    def signs(self, *shape: int) -> torch.Tensor:
        """Return a float32 tensor of ones, some of them negative."""

    def integers(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return a tensor of (nested lists of) integers."""


Sample: TypeAlias = Callable[[Maker], tuple[Any, ...]]
"""Makes the arguments of an op; a dict at the end holds keyword arguments."""


def _each(names: str, sample: Sample) -> dict[str, Sample]:
    """Return one sample for several aten ops."""
    return {f"aten::{name}": sample for name in names.split()}


def _same(shapes: tuple[tuple[int, ...], ...], names: str) -> dict[str, Sample]:
    """Return a sample of tensors of these shapes for several aten ops."""
    return _each(names, lambda m: tuple(m(*shape) for shape in shapes))


_MATRIX: dict[str, Sample] = {
    **_same(((3, 3),), "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh softplus tan trace"),
    "aten::_foreach_mm": lambda m: ([m(2, 3)], [m(3, 4)]),
    "aten::_sparse_addmm": lambda m: (m(2, 4), m(2, 3).to_sparse(), m(3, 4)),
    **_same(((2, 3), (2, 3)), "linalg_vecdot cosine_similarity dist pow.Tensor_Tensor atan2 polar"),
    **_same(((2, 3), (3, 4)), "mm matmul"),
    **_same(((2, 3), (4, 3)), "linear"),
    **_same(((3, 2, 5), (3, 5, 4)), "bmm"),
    **_same(((2, 4), (2, 3), (3, 4)), "addmm _addmm_activation"),
    **_same(((2, 4), (3, 2, 5), (3, 5, 4)), "addbmm"),
    **_same(((3, 2, 4), (3, 2, 5), (3, 5, 4)), "baddbmm"),
    **_same(((2,), (2, 3), (3,)), "addmv"),
    **_same(((2, 3), (2,), (3,)), "addr"),
    **_same(((2, 3), (3,)), "mv"),
    **_same(((3,), (3,)), "dot vdot"),
    **_same(((2, 3), (1,)), "prelu"),
    **_same(((2, 3), (2, 3), (2, 3)), "addcdiv addcmul"),
    **_same(((2, 3), (2, 4), (5, 3, 4)), "bilinear"),
    **_same(((4, 3), (5, 3)), "cdist"),
    **_same(((4, 3),), "pdist"),
    "aten::chain_matmul": lambda m: ([m(2, 3), m(3, 4), m(4, 2)],),
    "aten::linalg_multi_dot": lambda m: ([m(2, 3), m(3, 4), m(4, 2)],),
    "aten::einsum": lambda m: ("ij,jk->ik", [m(2, 3), m(3, 4)]),
    "aten::tensordot": lambda m: (m(2, 3), m(3, 4), [1], [0]),
    "aten::cross": lambda m: (m(2, 3), m(2, 3), 1),
    "aten::pow.Scalar": lambda m: (2.5, m(2, 3)),
    "aten::pow.Tensor_Scalar": lambda m: (m(2, 3), 2.5),
    "aten::renorm": lambda m: (m(2, 3), 2, 0, 1.0),
    "aten::logsumexp": lambda m: (m(2, 3), [1]),
    "aten::cat": lambda m: ([m(2, 3), m(1, 3)],),
    "aten::stack": lambda m: ([m(2, 3), m(2, 3)],),
    "aten::index_copy": lambda m: (m(3, 2), 0, m.integers([2, 0]), m(2, 2)),
    "aten::index_put": lambda m: (m(3, 2), [m.integers([2, 0])], m(2, 2)),
    "aten::scatter_add": lambda m: (m(3, 2), 0, m.integers([[0, 2]]), m(1, 2)),
    "aten::view_as_complex": lambda m: (m(3, 2),),
    "aten::quantile": lambda m: (m(5), m(2)),
    "aten::nanquantile": lambda m: (m(5), m(2)),
    "aten::quantile.scalar": lambda m: (m(5), 0.4),
    "aten::nanquantile.scalar": lambda m: (m(5), 0.4),
    "aten::fake_quantize_per_tensor_affine": lambda m: (m(3, 3), 0.1, 0, 0, 255),
}

_REDUCTIONS: dict[str, Sample] = {
    **_same(((2, 3),), "prod sum linalg_vector_norm nuclear_norm"),
    **_each("cumprod cumsum prod.dim_int softmax.int", lambda m: (m(2, 3), 0)),
    "aten::log_softmax.int": lambda m: (m(2, 3), 1),
    "aten::sum.dim_IntList": lambda m: (m(2, 3), [0]),
    "aten::linalg_matrix_norm": lambda m: (m(2, 3), 1),
    "aten::linalg_matrix_norm.str_ord": lambda m: (m(2, 3), "fro"),
    "aten::norm.Scalar": lambda m: (m(2, 3), 2),
    "aten::norm.ScalarOpt_dim": lambda m: (m(2, 3), 2, [0]),
    "aten::frobenius_norm.dim": lambda m: (m(2, 3), [0, 1]),
    "aten::nuclear_norm.dim": lambda m: (m(2, 3), [0, 1]),
    "aten::layer_norm": lambda m: (m(2, 3), [3], m(3), m(3)),
    "aten::native_layer_norm": lambda m: (m(2, 3), [3], m(3), m(3), 1e-5),
    "aten::rms_norm": lambda m: (m(2, 3), [3], m(3)),
    "aten::group_norm": lambda m: (m(2, 4, 3), 2, m(4), m(4)),
}


def _convolution(dimensions: int) -> Sample:
    return lambda m: (m(1, 2, *[5] * dimensions), m(3, 2, *[3] * dimensions), m(3))


def _padded_convolution(dimensions: int) -> Sample:
    return lambda m: (*_convolution(dimensions)(m), [1] * dimensions, "same")


def _transposed_convolution(dimensions: int) -> Sample:
    return lambda m: (m(1, 2, *[4] * dimensions), m(2, 3, *[3] * dimensions), m(3))


def _cell(gates: int) -> Sample:
    return lambda m: (m(2, 3), m(2, 4), m(4 * gates, 3), m(4 * gates, 4), m(4 * gates), m(4 * gates))


_GEOMETRY = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

_LAYERS: dict[str, Sample] = {
    **{f"aten::conv{n}d": _convolution(n) for n in (1, 2, 3)},
    **{f"aten::conv{n}d.padding": _padded_convolution(n) for n in (1, 2, 3)},
    "aten::conv_transpose1d": _transposed_convolution(1),
    "aten::conv_transpose2d.input": _transposed_convolution(2),
    "aten::conv_transpose3d.input": _transposed_convolution(3),
    "aten::conv_tbc": lambda m: (m(5, 1, 2), m(3, 2, 3), m(3)),
    "aten::convolution": lambda m: (*_convolution(2)(m), *_GEOMETRY),
    "aten::_convolution": lambda m: (*_convolution(2)(m), *_GEOMETRY, False, False, True, True),
    "aten::_convolution.deprecated": lambda m: (*_convolution(2)(m), *_GEOMETRY, False, False, True),
    "aten::cudnn_convolution": lambda m: (*_convolution(2)(m)[:2], [0, 0], [1, 1], [1, 1], 1, False, False, True),
    "aten::cudnn_convolution_transpose": lambda m: (
        *_transposed_convolution(2)(m)[:2],
        *([0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, True),
    ),
    "aten::gru_cell": _cell(3),
    "aten::rnn_relu_cell": _cell(1),
    "aten::rnn_tanh_cell": _cell(1),
    "aten::lstm_cell": lambda m: (m(2, 3), [m(2, 4), m(2, 4)], m(16, 3), m(16, 4), m(16), m(16)),
    "aten::_thnn_fused_gru_cell": lambda m: (m(2, 9), m(2, 9), m(2, 3), m(9), m(9)),
    "aten::_thnn_fused_lstm_cell": lambda m: (m(2, 12), m(2, 12), m(2, 3), m(12), m(12)),
    "aten::mkldnn_rnn_layer": lambda m: (
        *(m(3, 2, 4), m(20, 4), m(20, 5), m(20), m(20), m(2, 5), m(2, 5)),
        *(False, [], 2, 5, 1, True, False, False, False),
    ),
    **_same(((1, 2, 4, 8),) * 3, "scaled_dot_product_attention _scaled_dot_product_flash_attention"),
    "aten::_native_multi_head_attention": lambda m: (*(m(1, 4, 8),) * 3, *(8, 2, m(24, 8), m(24), m(8, 8), m(8))),
    "aten::adaptive_avg_pool3d": lambda m: (m(1, 1, 4, 4, 4), [2, 2, 2]),
    "aten::adaptive_max_pool3d": lambda m: (m(1, 1, 4, 4, 4), [2, 2, 2]),
    "aten::avg_pool3d": lambda m: (m(1, 1, 4, 4, 4), [2, 2, 2]),
    "aten::max_pool3d": lambda m: (m(1, 1, 4, 4, 4), [2, 2, 2]),
    "aten::fractional_max_pool2d": lambda m: (m(1, 1, 4, 4), [2, 2], [2, 2], m(1, 1, 2)),
    "aten::fractional_max_pool3d": lambda m: (m(1, 1, 4, 4, 4), [2, 2, 2], [2, 2, 2], m(1, 1, 3)),
    "aten::max_unpool2d": lambda m: (m(1, 1, 2, 2), m.integers([[[[0, 3], [9, 15]]]]), [4, 4]),
    "aten::max_unpool3d": lambda m: (
        m(1, 1, 1, 2, 2),
        *(m.integers([[[[[0, 3], [9, 15]]]]]), [2, 4, 4], [2, 2, 2], [0, 0, 0]),
    ),
    **_each("reflection_pad1d replication_pad1d", lambda m: (m(1, 2, 4), [1, 1])),
    **_each("reflection_pad2d replication_pad2d", lambda m: (m(1, 2, 4, 4), [1] * 4)),
    "aten::replication_pad3d": lambda m: (m(1, 2, 4, 4, 4), [1] * 6),
    **_each(
        "grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback",
        lambda m: (m(1, 1, 3, 3), m(1, 2, 2, 2), 0, 0, False),
    ),
    "aten::grid_sampler_3d": lambda m: (m(1, 1, 3, 3, 3), m(1, 2, 2, 2, 3), 0, 0, False),
    **_each(
        "_upsample_bicubic2d_aa _upsample_bilinear2d_aa upsample_bicubic2d upsample_bilinear2d",
        lambda m: (m(1, 1, 4, 4), [6, 6], False),
    ),
    "aten::upsample_linear1d": lambda m: (m(1, 1, 4), [6], False),
    "aten::upsample_trilinear3d": lambda m: (m(1, 1, 4, 4, 4), [6] * 3, False),
    **_each("_upsample_nearest_exact1d upsample_nearest1d", lambda m: (m(1, 1, 4), [6])),
    **_each("_upsample_nearest_exact2d upsample_nearest2d", lambda m: (m(1, 1, 4, 4), [6] * 2)),
    **_each("_upsample_nearest_exact3d upsample_nearest3d", lambda m: (m(1, 1, 4, 4, 4), [6] * 3)),
}

_LOSSES: dict[str, Sample] = {
    **_same(
        ((2, 3), (2, 3)),
        "binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss",
    ),
    **_same(((2, 3), (2, 3), (2, 3)), "triplet_margin_loss"),
    "aten::poisson_nll_loss": lambda m: (m(2, 3), m(2, 3), True, False, 1e-8, 1),
    "aten::soft_margin_loss": lambda m: (m(2, 3), m.signs(2, 3)),
    "aten::hinge_embedding_loss": lambda m: (m(2, 3), m.signs(2, 3)),
    "aten::margin_ranking_loss": lambda m: (m(2, 3), m(2, 3), m.signs(2, 3)),
    "aten::cosine_embedding_loss": lambda m: (m(2, 3), m(2, 3), m.signs(2)),
    "aten::multi_margin_loss": lambda m: (m(2, 3), m.integers([0, 2])),
    "aten::multilabel_margin_loss": lambda m: (m(2, 3), m.integers([[0, 2, -1], [1, -1, 0]])),
    "aten::multilabel_margin_loss_forward": lambda m: (m(2, 3), m.integers([[0, 2, -1], [1, -1, 0]]), 1),
    "aten::cross_entropy_loss": lambda m: (m(2, 3), m.integers([0, 2])),
    "aten::nll_loss": lambda m: (m(2, 3), m.integers([0, 2])),
    "aten::nll_loss2d": lambda m: (m(1, 3, 1, 2), m.integers([[[0, 2]]])),
    "aten::ctc_loss.IntList": lambda m: (m(5, 2, 4), m.integers([[1, 2], [3, 1]]), [5, 5], [2, 2]),
    "aten::ctc_loss.Tensor": lambda m: (
        m(5, 2, 4),
        m.integers([[1, 2], [3, 1]]),
        m.integers([5, 5]),
        m.integers([2, 2]),
    ),
}

_LINEAR_ALGEBRA: dict[str, Sample] = {
    **_each("_lu_with_info cholesky cholesky_inverse geqrf inverse linalg_cholesky", lambda m: (m.spd(3),)),
    **_each("linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals", lambda m: (m.spd(3),)),
    **_each("linalg_eigvalsh linalg_inv linalg_inv_ex linalg_qr linalg_svd linalg_svdvals", lambda m: (m.spd(3),)),
    **_each("linalg_matrix_sqrth pinverse qr svd", lambda m: (m.spd(3),)),
    **_each("cholesky_solve triangular_solve", lambda m: (m(3, 2), m.spd(3))),
    "aten::linalg_cond.p_str": lambda m: (m.spd(3), "fro"),
    "aten::linalg_householder_product": lambda m: (m(4, 2), m(2)),
    "aten::orgqr": lambda m: (m(4, 2), m(2)),
    "aten::ormqr": lambda m: (m(4, 2), m(2), m(4, 3)),
    "aten::linalg_lstsq": lambda m: (m.spd(3), m(3, 2)),
    "aten::linalg_matrix_rank": lambda m: (m.spd(3), 0.1),
    "aten::linalg_matrix_rank.atol_rtol_float": lambda m: (m.spd(3), {"atol": 0.1, "rtol": 0.1}),
    "aten::linalg_matrix_rank.atol_rtol_tensor": lambda m: (m.spd(3), {"atol": m(1), "rtol": m(1)}),
    "aten::linalg_matrix_rank.tol_tensor": lambda m: (m.spd(3), m(1)),
    "aten::linalg_solve": lambda m: (m.spd(3), m(3, 2)),
    "aten::linalg_tensorinv": lambda m: (m.spd(6).reshape(6, 2, 3), 1),
    "aten::linalg_tensorsolve": lambda m: (m.spd(6).reshape(2, 3, 6), m(2, 3)),
    "aten::lu_solve": lambda m: (m(3, 2), m.spd(3), m.integers([1, 2, 3], dtype=torch.int32)),
    **{
        f"aten::fft_{name}": lambda m: (m(4, 4),)
        for name in [
            "fft",
            "fft2",
            "fftn",
            "hfft",
            "ifft",
            "ifft2",
            "ifftn",
            "ihfft",
            "irfft",
            "irfft2",
            "irfftn",
            "rfft",
            "rfft2",
            "rfftn",
        ]
    },
    "aten::stft": lambda m: (m(16), 8, 4, 8, m(8), {"return_complex": True}),
    "aten::stft.center": lambda m: (m(16), 8, 4, 8, m(8), {"return_complex": True}),
}

SAMPLES: Mapping[str, Sample] = {**_MATRIX, **_REDUCTIONS, **_LAYERS, **_LOSSES, **_LINEAR_ALGEBRA}
"""Samples for every op of the built-in tables."""


def split(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of a sample."""
    if arguments and isinstance(arguments[-1], dict):
        return arguments[:-1], arguments[-1]
    return arguments, {}
