"""float8 (e4m3) matmuls for recipes: activations are cast at each call, weights once.

Experimental: Python takes about 0.1 ms for each call, in which a GPU computes a large matmul.

``torch._scaled_mm`` takes a scale for each row of the activations and each output feature, or one for each of the two
tensors. Scales ignore inf and nan. float8 has no inf, so the result for a row of activations with inf or nan is nan;
other rows do not change. A weight with inf or nan is not cast.

One Triton kernel casts if Triton is installed, else ATen ops.
"""

import functools
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from typing_extensions import override

from polycast.plugin import Availability, LowBitKernel

from ..low_bit_matmul import LowBitMatmul

_EXPERIMENTAL = (
    "float8 on CUDA is experimental: each call takes about 0.1 ms of Python, so it is slower than float16 unless "
    "matmuls are very large"
)
_SCHEMA = (
    "aten::_scaled_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "Tensor? scale_result=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor"
)
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_SMALLEST = 2.0**-110
"""The least magnitude that a scale is made for, so that scales and their inverses are normal numbers."""
_MULTIPLE = 16
_WITH_BIAS = (torch.bfloat16, torch.float16)


def float8_availability(scales: str) -> Availability:
    """Return whether torch and all visible GPUs support float8 matmuls with such scales."""
    if torch.version.hip is not None:
        return Availability(False, "there is no float8 for ROCm yet: its GPUs have other formats")
    op = getattr(torch.ops.aten, "_scaled_mm", None)
    if op is None or str(op.default._schema) != _SCHEMA:
        return Availability(False, f"torch._scaled_mm of torch {torch.__version__} has an unknown signature")
    if not torch.cuda.is_available():
        return Availability(False, "no CUDA device is visible")
    return float8_on(min(_capabilities()), max(_capabilities()), scales)


def float8_on(lowest: tuple[int, int], highest: tuple[int, int], scales: str) -> Availability:
    """Return the same for GPUs with compute capabilities in a range."""
    if lowest < (8, 9):
        return Availability(False, f"a GPU of compute capability {lowest[0]}.{lowest[1]} has no float8: it takes 8.9")
    if scales == "row" and highest >= (12, 0):
        return Availability(
            False,
            f"torch's row-wise float8 product fails on compute capability {highest[0]}.{highest[1]}: use "
            'Float8(scales="tensor")',
        )
    return Availability(True, _EXPERIMENTAL)


def _capabilities() -> list[tuple[int, int]]:
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


class Float8Matmul(LowBitMatmul):
    """The product of activations and a weight, with scales for the rows of both or one for each tensor."""

    def __init__(self, by_row: bool) -> None:
        self._by_row = by_row

    @override
    def unsupported_reason(self, x: torch.Tensor, size: Sequence[int], bias: torch.Tensor | None) -> str | None:
        features, terms = size
        if x.numel() == 0:
            return "a tensor is empty"
        if features % _MULTIPLE or terms % _MULTIPLE:
            return f"the weight's sizes, {features} and {terms}, are not both multiples of {_MULTIPLE}"
        if bias is not None and (bias.dim() != 1 or bias.shape[0] != features):
            return "the bias is not a vector of the output features"
        return None

    @override
    def prepack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        if not weight.isfinite().all():
            return None
        values, scale = cast_rows(weight, self._by_row)
        return values, scale.view(1, -1) if self._by_row else scale

    @override
    def multiply(
        self, x: torch.Tensor, packed: tuple[torch.Tensor, ...], bias: torch.Tensor | None, alpha: float
    ) -> torch.Tensor:
        weight, scale = packed
        wanted = torch.get_autocast_dtype(x.device.type)
        dtype = torch.bfloat16 if self._by_row else wanted  # of row-wise products
        values, scale_of_x = cast_rows(x, self._by_row)
        if alpha != 1:
            scale_of_x = scale_of_x * alpha
        fits = bias is not None and dtype in _WITH_BIAS
        added = bias.to(dtype).contiguous() if bias is not None and fits else None
        product = torch._scaled_mm(values, weight.t(), scale_of_x, scale, bias=added, out_dtype=dtype)
        if bias is not None and not fits:
            product += bias
        return product.to(wanted)


@functools.cache
def float8_kernels(scales: str) -> Mapping[str, LowBitKernel]:
    """Return the kernels of ``Float8(scales)`` by op."""
    return Float8Matmul(scales == "row").kernels()


def cast_rows(matrix: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in float8 and its float32 scales: [rows, 1], or a scalar.

    Values that are not finite become nan, and the scales ignore them.
    """
    fused = _fused() if matrix.is_cuda else None
    if fused is None:
        return cast_with_aten(matrix, by_row)
    with torch.cuda.device(matrix.device):  # Triton launches on the current device
        values, scale = fused.cast_rows(matrix if matrix.stride(1) == 1 else matrix.contiguous(), by_row, _SMALLEST)
    return values, scale


def cast_with_aten(matrix: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same, by ATen ops."""
    matrix = matrix.float()
    finite = matrix.isfinite()
    sizes = matrix.abs().where(finite, 0)
    largest = sizes.amax(1, keepdim=True) if by_row else sizes.amax()
    scale = largest.clamp(min=_SMALLEST) / _LARGEST
    # Some versions of torch cast inf to the largest number.
    values = (matrix / scale).where(finite, torch.nan).to(_FLOAT8)
    return values.contiguous(), scale


@functools.cache
def _fused() -> ModuleType | None:
    try:
        return importlib.import_module(".float8_triton", __package__)
    except ImportError:
        return None
