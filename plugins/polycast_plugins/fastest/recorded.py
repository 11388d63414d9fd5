"""Products that autograd records, in a region with the recipe `Fastest`: their operands, and how they are computed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from polycast.plugin import Plan

from .attention import RecordedAttention, op_action
from .autograd_functions import Computation, Convolution, ConvolutionSettings, Gradients, RecordedProduct
from .cases import ATTENTION
from .choose_way import Way
from .recorded_ways import RecordedOperands, Ways
from .workloads import by_axis, kernel_spans, size_hint, weight_position

NO_GRADIENTS = "autograd records it, and its gradients are computed in the fast dtype only"


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

    def native_action(self, ways: Ways, dtype: torch.dtype) -> Plan.Action | None:
        """Return what the native engine does for calls like this one; None if no op in C++ computes them."""
        name = _NATIVE.get(self.op)
        if not ways.is_float32 or name is None or (self.op == "aten::matmul" and self.second.dim() != 2):
            return None
        if self.settings is not None:
            x, weight, _, *settings, _ = self.args
            if x.dim() != weight.dim() or any(len(each) != weight.dim() - 2 for each in settings):
                return None
        saves_cast = self.first.requires_grad or self.settings is not None
        part = Plan.CACHED_CAST if saves_cast else Plan.AS_IT_IS
        return op_action(name, weight_position(self.op), part, (self.is_weight,))

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
        saves_both = self.settings is not None  # a convolution
        if second.requires_grad or saves_both:
            first = first.to(dtype)
        cast = second
        if ways.forward is Way.FAST or self.first.requires_grad or saves_both:
            cast = cast_weight(second) if self.is_weight else second.to(dtype)
        if not self.is_weight:
            second = cast  # the gradient of a weight keeps the weight's dtype

        def in_fast() -> torch.Tensor:
            args = [first if arg is self.first else cast if arg is self.second else arg for arg in self.args]
            result: torch.Tensor = Plan.in_dtype(self.op, args, dtype)
            return result

        def in_float32() -> torch.Tensor:
            result: torch.Tensor = Plan.in_dtype(self.op, self.args, torch.float32).to(dtype)
            return result

        computation = Computation(ways, dtype, cast, in_float32, in_fast, self.gradients)
        if self.settings is None:
            result: torch.Tensor = RecordedProduct.apply(computation, first, second, self.bias)  # type: ignore[no-untyped-call]
        else:
            result = Convolution.apply(computation, self.settings, first, second, self.bias)  # type: ignore[no-untyped-call]
        return result


def recorded_call(
    op: str, args: Sequence[Any], is_weight: bool, dtype: torch.dtype
) -> Recorded | RecordedAttention | None:
    """Return a call that autograd records, in a region of a fast dtype; None if its gradients are not computed here."""
    return RecordedAttention.of(op, args, dtype) if op == f"aten::{ATTENTION}" else Recorded.of(op, args, is_weight)


def _settings(
    weight: torch.Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> ConvolutionSettings | None:
    """Return the settings of a convolution; None for padding that differs between the sides."""
    axes = weight.dim() - 2
    strides, dilations = by_axis(stride, axes), by_axis(dilation, axes)
    if padding == "same":
        totals = kernel_spans(dilations, weight.shape[2:])
        if any(total % 2 for total in totals):
            return None
        padding = [total // 2 for total in totals]
    return ConvolutionSettings(strides, by_axis(0 if padding == "valid" else padding, axes), dilations, groups)


_NATIVE = {
    "aten::linear": "linear",
    "aten::addmm": "addmm",
    **dict.fromkeys(("aten::mm", "aten::matmul"), "matmul"),
    **dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d"), "convolution"),
}
"""The products that an op in C++ computes in float32, and the op, in native/ops.cpp."""
_RECORDED = {
    *("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "aten::bmm", "aten::baddbmm"),
    *(f"aten::conv{axes}d{overload}" for axes in (1, 2, 3) for overload in ("", ".padding")),
}
