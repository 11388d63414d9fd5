"""Products in float8 (e4m3), for recipes: activations are cast at each call, weights once.

Experimental: this was not measured on a GPU.

``torch._scaled_mm`` multiplies, with a scale for each row of the activations and each output feature, or one for each
of the two tensors. Scales are those of the finite values. float8 has no inf, so a row of activations with inf or nan
comes to nan, and the rows beside it to what they come to without. A weight with inf or nan is not cast.
"""

import functools
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import override

from polycast import Availability, LowBitKernel

from .float8_cast import cast_rows

_EXPERIMENTAL = "float8 on CUDA is experimental: it was not measured on a GPU, so it may be slower than bfloat16"
_SCHEMA = (
    "aten::_scaled_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "Tensor? scale_result=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor"
)
_MULTIPLE = 16
_NO_FIT = "the sizes do not fit"
_WITH_BIAS = (torch.bfloat16, torch.float16)


def float8_availability(scales: str) -> Availability:
    """Say whether torch and every GPU that it sees multiply float8 with such scales."""
    if torch.version.hip is not None:
        return Availability(False, "there is no float8 for ROCm yet: its GPUs have other formats")
    op = getattr(torch.ops.aten, "_scaled_mm", None)
    if op is None or str(op.default._schema) != _SCHEMA:
        return Availability(False, f"torch._scaled_mm of torch {torch.__version__} is not the one that is known")
    if not torch.cuda.is_available():
        return Availability(False, "no CUDA device is visible")
    return float8_on(min(_capabilities()), max(_capabilities()), scales)


def float8_on(lowest: tuple[int, int], highest: tuple[int, int], scales: str) -> Availability:
    """Say the same of GPUs whose compute capabilities are between two."""
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


class _Product(LowBitKernel):
    """What the ops have in common: the activations' rows by the weight, and something added."""

    activations: ClassVar[int] = 0

    def __init__(self, by_row: bool) -> None:
        self._by_row = by_row

    def _columns(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with a row for each column of the product."""
        raise NotImplementedError

    @override
    def prepare(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        rows = self._columns(weight)
        if not rows.isfinite().all():
            return None
        values, scale = cast_rows(rows, self._by_row)
        return values, scale.view(1, -1) if self._by_row else scale

    @override
    def declines(self, *args: Any) -> str | None:
        x, weight = args[self.activations], args[self.weight]
        if weight.dim() != 2:
            return "the weight is not a matrix"
        if x.layout is not torch.strided or weight.layout is not torch.strided:
            return "a tensor is not strided"
        columns, terms = self._columns(weight).shape
        if not self._takes(x) or x.shape[-1] != terms:
            return _NO_FIT
        if x.numel() == 0 or weight.numel() == 0:
            return "a tensor is empty"
        if columns % _MULTIPLE or terms % _MULTIPLE:
            return f"the weight's sizes, {columns} and {terms}, are not both multiples of {_MULTIPLE}"
        return None

    def _takes(self, x: torch.Tensor) -> bool:
        return x.dim() > 0

    def _multiply(
        self,
        prepared: tuple[torch.Tensor, ...],
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        weight, scale = prepared
        wanted = torch.get_autocast_dtype(x.device.type)
        dtype = torch.bfloat16 if self._by_row else wanted  # row-wise products come in no other
        values, scale_of_x = cast_rows(x.reshape(-1, x.shape[-1]), self._by_row)
        if factor != 1:
            scale_of_x = scale_of_x * factor
        fits = bias is not None and dtype in _WITH_BIAS
        added = bias.to(dtype).contiguous() if bias is not None and fits else None
        product = torch._scaled_mm(values, weight.t(), scale_of_x, scale, bias=added, out_dtype=dtype)
        if bias is not None and not fits:
            product += bias
        return product.to(wanted).view(*x.shape[:-1], weight.shape[0])


class Linear(_Product):
    """``aten::linear``: a weight [N, K]."""

    packing: Hashable = "rows are output features"

    @override
    def _columns(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    @override
    def declines(self, *args: Any) -> str | None:
        bias = args[2]
        if bias is not None and bias.shape != args[1].shape[:1]:
            return "the bias is not a vector of the output features"
        return super().declines(*args)

    @override
    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        x, _, bias = args
        return self._multiply(prepared, x, bias)


class Matmul(_Product):
    """``aten::matmul`` with a matrix on the right, [K, N]."""

    packing: Hashable = "columns are output features"

    @override
    def _columns(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    @override
    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        return self._multiply(prepared, args[0])


class Mm(Matmul):
    """``aten::mm``: a matrix by a weight [K, N]."""

    @override
    def _takes(self, x: torch.Tensor) -> bool:
        return x.dim() == 2


class Addmm(Mm):
    """``aten::addmm``: ``beta * bias + alpha * (a @ weight)``, of a bias that is a vector."""

    weight = 2
    activations = 1

    @override
    def declines(self, *args: Any) -> str | None:
        bias, _, weight, beta, alpha = args
        reason = super().declines(*args)
        if reason is not None:
            return reason
        if bias.dim() != 1 or bias.shape[0] != weight.shape[1]:
            return "what is added is not a vector of the output features"
        if isinstance(beta, complex) or isinstance(alpha, complex):
            return "beta or alpha is complex"
        return None

    @override
    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        bias, x, _, beta, alpha = args
        if beta == 0:  # then torch does not look at what is added, which may be nan
            bias = None
        elif beta != 1:
            bias = bias.float() * beta
        return self._multiply(prepared, x, bias, float(alpha))


@functools.cache
def float8_kernels(scales: str) -> Mapping[str, LowBitKernel]:
    """Return the kernels of ``Float8(scales)``, by op."""
    by_row = scales == "row"
    return {
        "aten::linear": Linear(by_row),
        "aten::matmul": Matmul(by_row),
        "aten::mm": Mm(by_row),
        "aten::addmm": Addmm(by_row),
    }
