"""The ops for which torch has no bfloat16 or no float16 kernels on the CPU; in regions they compute in float32."""

from collections.abc import Collection, Mapping

import torch

from .instructions import has_lstm

_BOTH = (torch.bfloat16, torch.float16)

_POLYNOMIALS = (
    *("chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w"),
    *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
    *("shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u"),
    *("shifted_chebyshev_polynomial_v", "shifted_chebyshev_polynomial_w"),
)
_SPECIAL = (
    *("airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "erfcx", "log_ndtr"),
    *("modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "ndtri"),
    *("scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0", "zeta"),
)
_IN_NEITHER = (
    *("_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "histogram.bin_ct"),
    *("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "linalg_ldl_factor", "linalg_ldl_factor_ex"),
    *("linalg_ldl_solve", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_pinv.atol_rtol_tensor"),
    *("linalg_solve_triangular", "linalg_vander", "logdet"),
    *("_sample_dirichlet", "_standard_gamma", "binomial"),
    *("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_lanczos2d_aa"),
    *("fft_hfft2", "fft_hfftn", "fft_ihfft2", "fft_ihfftn"),
    *("fake_quantize_per_channel_affine_cachemask", "pdist", "sparse_sampled_addmm", "sspaddmm"),
    *(f"special_{name}" for name in (*_POLYNOMIALS, *_SPECIAL)),
)

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""MKL, which computes products of these, has neither dtype."""


def missing_kernels() -> Mapping[str | torch.layout, Collection[torch.dtype]]:
    """Return the dtypes that torch has no kernels for on this processor, by op and layout."""
    return {
        **{f"aten::{name}": _BOTH for name in _IN_NEITHER},
        **dict.fromkeys(_COMPRESSED, _BOTH),
        "aten::complex": (torch.bfloat16,),
        "aten::mkldnn_rnn_layer": [dtype for dtype in _BOTH if not has_lstm(dtype)],
    }
