"""Products of activations and a weight in low bit: what a backend writes once, and the kernels of four ops from it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from typing_extensions import override

from .backend import LowBitKernel

_Packed: TypeAlias = "tuple[torch.Tensor, ...]"
_Multiply: TypeAlias = "Callable[[torch.Tensor, _Packed, torch.Tensor | None, float], torch.Tensor]"

_NO_FIT = "the sizes do not fit"


class LowBitProduct:
    """What multiplies activations by a weight in low bit: from it come the kernels of linear, matmul, mm and addmm.

    A backend's subclass says how a matrix is packed and how it is multiplied by; polycast reads the arguments of the
    ops, declines what does not fit, transposes weights, scales what is added, and gives results the shape they have.

    Attributes:
        takes_batches: whether `multiply` takes activations of any number of dimensions. If not, it gets matrices.

    Example:
        >>> import polycast
        >>> class Product(polycast.LowBitProduct):
        ...     def pack(self, weight):
        ...         return (weight.clone(),)
        ...     def multiply(self, x, packed, bias, alpha):
        ...         ...
        >>> sorted(Product().kernels())
        ['aten::addmm', 'aten::linear', 'aten::matmul', 'aten::mm']
    """

    takes_batches: bool = False

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Return what a weight is packed into, of tensors that nothing else uses; None where this weight cannot be.

        Called once for each state of the weight, without autograd and outside of autocast. It may look at its values.

        Args:
            weight: [N, K], a row for each output feature, with any strides; float32, bfloat16 or float16.
        """
        raise NotImplementedError

    def multiply(
        self, x: torch.Tensor, packed: tuple[torch.Tensor, ...], bias: torch.Tensor | None, alpha: float
    ) -> torch.Tensor:
        """Return ``alpha * (x @ weight.T) + bias`` in the fast dtype: ``torch.get_autocast_dtype`` of the device.

        Args:
            x: activations, in the dtype that the caller gave them: [M, K], or [..., K] with `takes_batches`.
            packed: what `pack` returned.
            bias: what is added, broadcast to the result [M, N]; of linear, and nearly always, a vector [N].
            alpha: 1.0, save for what addmm is given.

        Returns:
            [M, N], or [..., N], contiguous.
        """
        raise NotImplementedError

    def declines(self, x: torch.Tensor, size: Sequence[int], bias: torch.Tensor | None) -> str | None:
        """Say why a product that fits, of a weight with elements, is not for `multiply`, or None: it is.

        Asked of every call, of fake tensors too: it may look at dtypes, sizes and strides, and at no values.

        Args:
            x: activations, [..., K].
            size: of the weight, N and K.
            bias: what is added, as the caller gave it.
        """
        return None

    def kernels(self) -> Mapping[str, LowBitKernel]:
        """Return the kernels, by op: for ``Backend.low_bit_kernels`` to return, as they are or beside others."""
        return {
            "aten::linear": _Linear(self),
            "aten::matmul": _Matmul(self),
            "aten::mm": _Mm(self),
            "aten::addmm": _Addmm(self),
        }


class _Kernel(LowBitKernel):
    def __init__(self, product: LowBitProduct) -> None:
        self._pack = product.pack
        self._declines = product.declines
        self._multiply = product.multiply if product.takes_batches else _by_matrices(product.multiply)
        self.packing: Hashable = type(product), self._packing

    _packing: str


class _Linear(_Kernel):
    """``aten::linear``: a weight [N, K]."""

    _packing = "rows are output features"

    @override
    def declines(self, *args: Any) -> str | None:
        x, weight, bias = args
        size = weight.shape
        if bias is not None and bias.shape != size[:1]:
            return "the bias is not a vector of the output features"
        return _misfit(x, size) or self._declines(x, size, bias)

    @override
    def prepare(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        return self._pack(weight)

    @override
    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        x, _, bias = args
        return self._multiply(x, prepared, bias, 1.0)


class _Matmul(_Kernel):
    """``aten::matmul`` with a matrix on the right, [K, N]."""

    _packing = "columns are output features"

    @override
    def declines(self, *args: Any) -> str | None:
        x, weight = args
        size = weight.shape[::-1]
        return _misfit(x, size) or self._declines(x, size, None)

    @override
    def prepare(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        return self._pack(weight.t())

    @override
    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        return self._multiply(args[0], prepared, None, 1.0)


class _Mm(_Matmul):
    """``aten::mm``: a matrix by a weight [K, N]."""

    @override
    def declines(self, *args: Any) -> str | None:
        return _NO_FIT if args[0].dim() != 2 else super().declines(*args)


class _Addmm(_Matmul):
    """``aten::addmm``: ``beta * bias + alpha * (x @ weight)``, of a bias that is broadcast."""

    weight = 2

    @override
    def declines(self, *args: Any) -> str | None:
        bias, x, weight, beta, alpha = args
        size = weight.shape[::-1]
        reason = _misfit(x, size)
        if reason is not None:
            return reason
        if x.dim() != 2 or not _is_broadcast(bias.shape, (x.shape[0], size[0])):
            return _NO_FIT
        if isinstance(beta, complex) or isinstance(alpha, complex):
            return "beta or alpha is complex"
        return self._declines(x, size, bias)

    @override
    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        bias, x, _, beta, alpha = args
        if beta == 0:  # then torch does not look at what is added, which may be nan
            bias = None
        elif beta != 1:
            bias = bias.float() * beta
        return self._multiply(x, prepared, bias, float(alpha))


def _misfit(x: torch.Tensor, size: Sequence[int]) -> str | None:
    """Say why activations cannot be multiplied by a weight of N features of K terms."""
    if len(size) != 2:
        return "the weight is not a matrix"
    if x.dim() == 0 or x.shape[-1] != size[1]:
        return _NO_FIT
    return "the weight has no elements" if 0 in size else None


def _is_broadcast(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Say whether a tensor of a shape can be added to one of another without that becoming larger."""
    if len(shape) > len(to):
        return False
    return all(own in (1, size) for own, size in zip(reversed(shape), reversed(to), strict=False))


def _by_matrices(multiply: _Multiply) -> _Multiply:
    """Return what multiplies activations of any number of dimensions, by what multiplies matrices."""

    def multiply_each(
        x: torch.Tensor, packed: tuple[torch.Tensor, ...], bias: torch.Tensor | None, alpha: float
    ) -> torch.Tensor:
        if x.dim() == 2:
            return multiply(x, packed, bias, alpha)
        product = multiply(x.reshape(-1, x.shape[-1]), packed, bias, alpha)
        return product.view(*x.shape[:-1], product.shape[-1])

    return multiply_each
