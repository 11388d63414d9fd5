"""`LowBitMatmul`: the kernels of linear, matmul, mm and addmm, from one low-bit matrix multiplication."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import override

from polycast.plugin import LowBitKernel

_SIZE_MISMATCH = "the sizes do not fit"


class LowBitMatmul:
    """Multiplies activations by a low-bit weight. A backend subclasses it.

    polycast makes the kernels of four ops from it: they read the ops' arguments, support only sizes that match,
    transpose weights and reshape results.

    Attributes:
        takes_batches: whether `multiply` takes activations of any number of dimensions. If not, it gets matrices.
        operators: optional; by op, such as ``"aten::linear"``, an operator in C++ that computes it, in place of
            `multiply`; see :class:`polycast.plugin.LowBitKernel`.
        constants: the last arguments of these operators.
        equalizes, levels: what of a calibration `prepack` takes too; see `polycast.plugin.LowBitKernel`.

    Example:
        >>> from polycast_plugins.quantize import LowBitMatmul
        >>> class Matmul(LowBitMatmul):
        ...     def prepack(self, weight):
        ...         return (weight.clone(),)
        ...     def multiply(self, x, prepacked, bias, alpha):
        ...         ...
        >>> sorted(Matmul().kernels())
        ['aten::addmm', 'aten::linear', 'aten::matmul', 'aten::mm']
    """

    takes_batches: bool = False
    operators: Mapping[str, Any] = MappingProxyType({})
    constants: Sequence[Any] = ()
    equalizes: bool = False
    levels: str = ""

    def prepack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Return the prepacked weight, tensors with memory of their own; None if this weight cannot be prepacked.

        Called once for each state of the weight, without autograd and outside of autocast. It may read its values.

        Args:
            weight: [N, K], a row for each output feature, with any strides; float32, bfloat16 or float16.
        """
        raise NotImplementedError

    def compensate(self, weight: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the levels of a weight, so rounded that its products change least; see `compensate_errors`.

        Called by :func:`polycast.calibrate` if the class has `levels`. ``prepack(weight, factors, levels)`` takes the
        result, of this or another process, for the same weight.

        Args:
            weight: float32 [N, K], multiplied by the factors.
            moments: float32 [K, K], the sum of ``x.T @ x`` over activations `x`, [rows, K], divided by the factors.

        Returns:
            Contiguous tensors in host memory, of dtypes that safetensors has.
        """
        raise NotImplementedError

    def multiply(
        self, x: torch.Tensor, prepacked: tuple[torch.Tensor, ...], bias: torch.Tensor | None, alpha: float
    ) -> torch.Tensor:
        """Return ``alpha * (x @ weight.T) + bias`` in the fast dtype: ``torch.get_autocast_dtype`` of the device.

        Args:
            x: activations, in the caller's dtype: [M, K], or [..., K] with `takes_batches`.
            prepacked: what `prepack` returned.
            bias: broadcast to the result [M, N]; for linear, and almost always, a vector [N].
            alpha: 1.0, except in addmm.

        Returns:
            [M, N], or [..., N], contiguous.
        """
        raise NotImplementedError

    def unsupported_reason(self, x: torch.Tensor, size: Sequence[int], bias: torch.Tensor | None) -> str | None:
        """Return why `multiply` does not support a call with matching, nonzero sizes; None if it does.

        Called with fake tensors too. It may read dtypes, sizes, strides and devices, but no values. The native engine
        keeps the answer, which must depend on nothing else.

        Args:
            x: activations, [..., K].
            size: the weight's, N and K.
            bias: the caller's.
        """
        return None

    def kernels(self) -> Mapping[str, LowBitKernel]:
        """Return the kernels by op, for ``Backend.low_bit_kernels`` to return alone or with others."""
        kinds = {"aten::linear": _Linear, "aten::matmul": _Matmul, "aten::mm": _Mm, "aten::addmm": _Addmm}
        return {op: kind(self, self.operators.get(op)) for op, kind in kinds.items()}


class _Matmul(LowBitKernel):
    """``aten::matmul`` with a matrix on the right, [K, N]."""

    weight_layout = "columns are output features"

    def __init__(self, matmul: LowBitMatmul, operator: Any) -> None:
        self._matmul = matmul
        self.operator = operator
        self.constants = matmul.constants
        self.equalizes, self.levels = matmul.equalizes, matmul.levels
        self.compensate = matmul.compensate
        self.prepack_key: Hashable = type(matmul), self.weight_layout

    @override
    def unsupported_reason(self, *args: Any) -> str | None:
        x, weight = args
        size = weight.shape[::-1]
        return _size_mismatch(x, size) or self._matmul.unsupported_reason(x, size, None)

    @override
    def prepack(self, weight: torch.Tensor, *of_calibration: Any) -> tuple[torch.Tensor, ...] | None:
        prepack: Callable[..., tuple[torch.Tensor, ...] | None] = self._matmul.prepack
        return prepack(self._rows(weight), *of_calibration)

    def _rows(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with a row for each output feature."""
        return weight.t()

    @override
    def run(self, prepacked: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        if self.operator is not None:
            return super().run(prepacked, *args)
        x, bias, alpha = self._operands(*args)
        if x.dim() == 2 or self._matmul.takes_batches:
            return self._matmul.multiply(x, prepacked, bias, alpha)
        result = self._matmul.multiply(x.reshape(-1, x.shape[-1]), prepacked, bias, alpha)
        return result.view(*x.shape[:-1], result.shape[-1])

    def _operands(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """Return the activations, the bias and alpha."""
        return args[0], None, 1.0


class _Linear(_Matmul):
    """``aten::linear``: a weight [N, K]."""

    weight_layout = "rows are output features"

    @override
    def unsupported_reason(self, *args: Any) -> str | None:
        x, weight, bias = args
        size = weight.shape
        if bias is not None and bias.shape != size[:1]:
            return "the bias is not a vector of the output features"
        return _size_mismatch(x, size) or self._matmul.unsupported_reason(x, size, bias)

    @override
    def _rows(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    @override
    def _operands(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        return args[0], args[2], 1.0


class _Mm(_Matmul):
    """``aten::mm``: a matrix by a weight [K, N]."""

    @override
    def unsupported_reason(self, *args: Any) -> str | None:
        return _SIZE_MISMATCH if args[0].dim() != 2 else super().unsupported_reason(*args)


class _Addmm(_Matmul):
    """``aten::addmm``: ``beta * bias + alpha * (x @ weight)``, with a bias that is broadcast."""

    weight = 2

    @override
    def unsupported_reason(self, *args: Any) -> str | None:
        bias, x, weight, beta, alpha = args
        size = weight.shape[::-1]
        reason = _size_mismatch(x, size)
        if reason is not None:
            return reason
        if x.dim() != 2 or not _can_broadcast(bias.shape, (x.shape[0], size[0])):
            return _SIZE_MISMATCH
        if isinstance(beta, complex) or isinstance(alpha, complex):
            return "beta or alpha is complex"
        return self._matmul.unsupported_reason(x, size, bias)

    @override
    def _operands(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        bias, x, _, beta, alpha = args
        if beta == 0:  # torch then ignores the bias, nan included
            bias = None
        elif beta != 1:
            bias = bias.float() * beta
        return x, bias, float(alpha)


def _size_mismatch(x: torch.Tensor, size: Sequence[int]) -> str | None:
    """Return why activations cannot be multiplied by a weight of size (N, K)."""
    if len(size) != 2:
        return "the weight is not a matrix"
    if x.dim() == 0 or x.shape[-1] != size[1]:
        return _SIZE_MISMATCH
    return "the weight has no elements" if 0 in size else None


def _can_broadcast(shape: Sequence[int], to: Sequence[int]) -> bool:
    if len(shape) > len(to):
        return False
    return all(own in (1, size) for own, size in zip(reversed(shape), reversed(to), strict=False))
