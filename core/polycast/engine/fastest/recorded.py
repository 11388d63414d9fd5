"""Products that autograd records, in a region with the recipe `Fastest`: their operands, and how they are computed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...policy.schemas import find_op, unflatten_arguments
from ...profiling.cases import ATTENTION
from ...torch_internals.names import size_hint
from ..low_bit.actions import Results
from ..low_bit.plan import FLOATS
from .choose_way import Way
from .functions import Convolution, ConvolutionSettings, Forward, Gradients, Recomputed, RecordedProduct
from .products import weight_position
from .training import RecordedOperands, Ways

UNRECORDED = "autograd records it, and its gradients are computed in the fast dtype only"


def in_dtype(op: str, args: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return the one result of an op, given by its name, on its arguments in a dtype."""
    result = computed_in(dtype, op, args)
    assert isinstance(result, torch.Tensor)
    return result


def computed_in(dtype: torch.dtype, op: str, args: Sequence[Any]) -> Results:
    """Return what an op, given by its name, returns on its arguments in a dtype."""
    overload = find_op(op)
    assert overload is not None  # it was called
    if dtype is torch.float32 and copies_matrix(op, args):
        args = (args[0].to(dtype, memory_format=torch.contiguous_format).contiguous(), *args[1:])
    converted = [arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.dtype in FLOATS else arg for arg in args]
    positional, named = unflatten_arguments(overload, converted)
    results: Results = overload(*positional, **named)
    return results


def results_in(dtype: torch.dtype, results: Results) -> Results:
    """Return what an op returned, with floating-point numbers in a dtype."""
    if isinstance(results, torch.Tensor):
        return results.to(dtype)
    return tuple(each if each is None or not each.is_floating_point() else each.to(dtype) for each in results)


def copies_matrix(op: str, args: Sequence[Any]) -> bool:
    """Return whether torch may copy a matrix for each batch of the first argument, unless that is made contiguous.

    See also native/kernel.h.
    """
    if op not in ("aten::linear", "aten::matmul"):
        return False
    first, matrix = args[:2]
    if any(each.is_nested or each.layout is not torch.strided for each in (first, matrix)):
        return False
    return first.dim() > 2 and matrix.dim() <= 2 and not first.is_contiguous()


def has_native_function(op: str, args: Sequence[Any]) -> bool:
    """Return whether the native engine has an autograd function for a call; see native/recorded.h."""
    if op in ("aten::conv1d", "aten::conv2d", "aten::conv3d"):
        x, weight, _, *settings, _ = args
        return x.dim() == weight.dim() and all(len(each) == weight.dim() - 2 for each in settings)
    return op in ("aten::linear", "aten::mm", "aten::addmm")


class Recorded(NamedTuple):
    """A product that autograd records.

    Attributes:
        op: by its name in the dispatcher.
        args: its arguments.
        first, second, bias: the tensors among them; `second` is the weight or the second matrix.
        is_weight: whether it is a weight.
        settings: for convolutions, their other arguments.
        gradients: for other products, their gradients.
    """

    op: str
    args: Sequence[Any]
    first: torch.Tensor
    second: torch.Tensor
    bias: torch.Tensor | None
    is_weight: bool
    settings: ConvolutionSettings | None
    gradients: Gradients

    @classmethod
    def of(cls, op: str, args: Sequence[Any], is_weight: bool) -> "Recorded | None":
        """Return a call as a recorded product; None if its gradients are not computed here."""
        if op not in _RECORDED:
            return None
        position = weight_position(op)
        first, second = args[position - 1], args[position]
        if first.dim() < 2 and op != "aten::linear":
            return None
        bias, settings = None, None
        scalars: Sequence[Any] = (1, 1)
        if position == 2:
            bias, scalars = args[0], args[3:]
        elif "conv" in op:
            bias, settings = args[2], _settings(second, *args[3:])
            if settings is None:
                return None
        elif op == "aten::linear":
            bias = args[2]
        gradients = Gradients(op == "aten::linear", *scalars)
        return cls(op, args, first, second, bias, is_weight, settings, gradients)

    def operands(self, is_cached: bool, in_function: bool) -> RecordedOperands:
        """Return what the choice of ways depends on.

        Args:
            is_cached: whether the cast of the weight will be found in a cache.
            in_function: whether an autograd function runs the op, and will record it later.
        """
        wide = torch.float32
        return RecordedOperands(
            size_hint(self.first.numel()),
            size_hint(self.second.numel()),
            self.first.dtype is wide,
            self.second.dtype is wide and not self.is_weight,
            self.is_weight,
            is_cached,
            self.first.requires_grad or in_function,
            self.second.requires_grad,
        )

    def compute(
        self, ways: Ways, dtype: torch.dtype, cast_weight: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Compute the product, recorded as one autograd function.

        Args:
            ways: the ways for the forward and the gradients.
            dtype: the fast dtype.
            cast_weight: returns the cast of a weight, from a cache if it is there.
        """
        first, second = self.first, self.second
        is_saved = self.settings is not None
        if second.requires_grad or is_saved:
            first = first.to(dtype)
        if not self.is_weight and (self.first.requires_grad or is_saved):
            second = second.to(dtype)

        def in_fast() -> torch.Tensor:
            weight = cast_weight(self.second) if self.is_weight else second
            args = [first if arg is self.first else weight if arg is self.second else arg for arg in self.args]
            return in_dtype(self.op, args, dtype)

        def in_float32() -> torch.Tensor:
            return in_dtype(self.op, self.args, torch.float32).to(dtype)

        call = Forward(ways, dtype, in_float32, in_fast, self.gradients)
        if self.settings is None:
            result: torch.Tensor = RecordedProduct.apply(call, first, second, self.bias)  # type: ignore[no-untyped-call]
        else:
            result = Convolution.apply(call, self.settings, first, second, self.bias)  # type: ignore[no-untyped-call]
        return result


class RecordedAttention(NamedTuple):
    """An attention that autograd records; its backward computes it again.

    Attributes:
        op: by its name in the dispatcher.
        args: its arguments.
    """

    op: str
    args: Sequence[Any]

    @classmethod
    def of(cls, op: str, args: Sequence[Any]) -> "RecordedAttention | None":
        """Return a call as a recorded attention; None with dropout, which would differ in the backward."""
        _, _, _, _, dropout, *_ = args
        return None if dropout else cls(op, args)

    @property
    def _positions(self) -> list[int]:
        """The positions of the tensors among the arguments."""
        return [at for at, arg in enumerate(self.args) if isinstance(arg, torch.Tensor)]

    def operands(self, is_cached: bool, in_function: bool) -> RecordedOperands:
        """Return what the choice of ways depends on; see :meth:`Recorded.operands`."""
        query, key, value, *_ = self.args
        is_needed = in_function or any(self.args[at].requires_grad for at in self._positions)
        return RecordedOperands(
            size_hint(query.numel()),
            size_hint(key.numel()) + size_hint(value.numel()),
            query.dtype is torch.float32,
            key.dtype is torch.float32,
            is_weight=False,
            is_cached=False,
            first_needed=is_needed,
            second_needed=is_needed,
        )

    def compute(
        self, ways: Ways, dtype: torch.dtype, cast_weight: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Compute the attention, recorded as one autograd function; see :meth:`Recorded.compute`."""
        op, args, positions = self.op, self.args, self._positions
        others = [None if at in positions else arg for at, arg in enumerate(args)]
        of_way = {way: torch.float32 if way is Way.FLOAT32 else dtype for way in Way}
        # The mask is saved as it is: it is often shared, and may have numbers that the fast dtype has not.
        saved = [args[at].to(dtype) if at < 3 else args[at] for at in positions]

        def forward() -> torch.Tensor:
            return in_dtype(op, args, of_way[ways.forward]).to(dtype)

        def again(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            given = list(others)
            for at, tensor in zip(positions, tensors, strict=True):
                given[at] = tensor
            return in_dtype(op, given, of_way[ways.first])

        result: torch.Tensor = Recomputed.apply(forward, again, *saved)  # type: ignore[no-untyped-call]
        return result


def recorded_call(op: str, args: Sequence[Any], is_weight: bool) -> Recorded | RecordedAttention | None:
    """Return a call that autograd records; None if its gradients are not computed here."""
    return RecordedAttention.of(op, args) if op == f"aten::{ATTENTION}" else Recorded.of(op, args, is_weight)


def _settings(
    weight: torch.Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> ConvolutionSettings | None:
    """Return the settings of a convolution; None for padding that differs between the sides."""
    axes = weight.dim() - 2
    strides, dilations = _by_axis(stride, axes), _by_axis(dilation, axes)
    if padding == "same":
        totals = [step * (size - 1) for step, size in zip(dilations, weight.shape[2:], strict=True)]
        if any(total % 2 for total in totals):
            return None
        padding = [total // 2 for total in totals]
    return ConvolutionSettings(strides, _by_axis(0 if padding == "valid" else padding, axes), dilations, groups)


def _by_axis(given: Any, axes: int) -> list[int]:
    numbers = list(given) if isinstance(given, Sequence) else [given]
    return numbers * axes if len(numbers) == 1 else numbers


_RECORDED = {
    *("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "aten::bmm", "aten::baddbmm"),
    *(f"aten::conv{axes}d{overload}" for axes in (1, 2, 3) for overload in ("", ".padding")),
}
