"""Products that autograd records, computed partly in float32.

What is saved for the backward are the casts of the operands, with their autograd history, as in any region, so that
either may be written before the backward. The backward consists of ops that autograd can record, so that it can be
differentiated again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from polycast.plugin import disable_autocast

from .choose_way import Way, dtype_of
from .recorded_ways import Ways


class Computation(NamedTuple):
    """Computes a matmul or convolution and its gradients, each in its way.

    Attributes:
        ways: the ways for the forward and the gradients.
        dtype: the fast dtype.
        cast: of the second operand, if the forward or the backward needs it.
        in_float32, in_fast: compute the forward in that dtype. The result has the fast dtype.
        gradients: returns the gradients of the operands.
    """

    ways: Ways
    dtype: torch.dtype
    cast: torch.Tensor
    in_float32: Callable[[], torch.Tensor]
    in_fast: Callable[[], torch.Tensor]
    gradients: "Gradients"

    def result(self) -> torch.Tensor:
        """Compute the result in the way of the forward."""
        with disable_autocast():
            result = (self.in_float32 if self.ways.forward is Way.FLOAT32 else self.in_fast)()
        return result.detach() if result._is_view() else result  # autograd lets no view of a function be written


class Gradients:
    """The gradients of ``beta * bias + alpha * (first @ second)``, or of a linear."""

    def __init__(self, is_linear: bool = False, beta: float = 1, alpha: float = 1) -> None:
        self._is_linear = is_linear
        self.beta = beta
        self._alpha = alpha

    def of_first(self, gradient: torch.Tensor, second: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the gradient of the first operand, of a shape, all in one dtype."""
        found = gradient.matmul(second if self._is_linear else second.mT).sum_to_size(shape)
        return found if self._alpha == 1 else found * self._alpha

    def of_second(self, gradient: torch.Tensor, first: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the gradient of the second operand, of a shape."""
        if len(shape) == 2:
            rows, columns = first.reshape(-1, first.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
            found = columns.t().mm(rows) if self._is_linear else rows.t().mm(columns)
        else:
            found = first.mT.matmul(gradient).sum_to_size(shape)
        return found if self._alpha == 1 else found * self._alpha

    def of_bias(self, gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the gradient of the bias, in float32."""
        found = _sum_to_size(gradient, shape)
        return found if self.beta == 1 else found * self.beta


class RecordedProduct(torch.autograd.Function):
    """A product whose forward and gradients are each computed in the fast dtype or in float32."""

    @staticmethod
    def forward(
        ctx: Any, computation: Computation, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the product; `first` is a cast if it is saved, and `second` a cast or a weight."""
        ctx.set_materialize_grads(False)
        ctx.ways, ctx.dtype, ctx.gradients = computation.ways, computation.dtype, computation.gradients
        ctx.shapes = first.shape, second.shape, None if bias is None else bias.shape
        ctx.dtypes = first.dtype, second.dtype, None if bias is None else bias.dtype
        _, for_first, for_second, _ = ctx.needs_input_grad
        ctx.save_for_backward(first if for_second else None, computation.cast if for_first else None)
        return computation.result()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        """Return the gradients of what was saved, in its dtypes."""
        if gradient is None:
            return None, None, None, None
        _, for_first, for_second, for_bias = ctx.needs_input_grad
        first, second = ctx.saved_tensors
        ways, rule = ctx.ways, ctx.gradients
        of_first = of_second = of_bias = None
        with disable_autocast():
            of_way = _Converted(gradient, ctx.dtype)
            if for_first:
                way = ways.first
                of_first = rule.of_first(of_way(way), _converted(second, way, ctx.dtype), ctx.shapes[0])
                of_first = of_first.to(ctx.dtypes[0])
            if for_second:
                way = ways.second
                of_second = rule.of_second(of_way(way), _converted(first, way, ctx.dtype), ctx.shapes[1])
                of_second = of_second.to(ctx.dtypes[1])
            if for_bias:
                of_bias = rule.of_bias(of_way.widest, ctx.shapes[2]).to(ctx.dtypes[2])
        return None, of_first, of_second, of_bias


class _Converted:
    """A gradient in the dtype of each way, converted once."""

    def __init__(self, gradient: torch.Tensor, dtype: torch.dtype) -> None:
        self._gradient = gradient
        self._dtype = dtype
        self._float32: torch.Tensor | None = None

    def __call__(self, way: Way) -> torch.Tensor:
        if way is not Way.FLOAT32:
            return self._gradient.to(self._dtype)
        if self._float32 is None:
            self._float32 = self._gradient.float()
        return self._float32

    @property
    def widest(self) -> torch.Tensor:
        """The gradient in float32 if it was converted, for sums, which are slower in other dtypes."""
        return self._gradient if self._float32 is None else self._float32


def _converted(tensor: torch.Tensor, way: Way, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype_of(way, dtype))


def _sum_to_size(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a gradient summed to a shape that was broadcast to its own, in float32."""
    missing = gradient.dim() - len(shape)
    dims = [*range(missing)]
    dims += [at for at in range(missing, gradient.dim()) if shape[at - missing] == 1 and gradient.shape[at] != 1]
    if not dims:
        return gradient.float()
    return gradient.sum(dims, dtype=torch.float32).reshape(shape)


class Convolution(torch.autograd.Function):
    """A convolution whose forward and backward are each computed in the fast dtype or in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        computation: Computation,
        settings: "ConvolutionSettings",
        first: torch.Tensor,
        second: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the convolution; `first` is the cast of the images, and `second` a cast or a weight."""
        ctx.set_materialize_grads(False)
        ctx.ways, ctx.dtype, ctx.settings = computation.ways, computation.dtype, settings
        ctx.dtypes = first.dtype, second.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(first, computation.cast)
        return computation.result()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        """Return the gradients of what was saved, in its dtypes."""
        if gradient is None:
            return None, None, None, None, None
        first, second = ctx.saved_tensors
        _, _, *needed = ctx.needs_input_grad
        way = ctx.ways.first if needed[0] else ctx.ways.second
        with disable_autocast():
            of_way = _Converted(gradient, ctx.dtype)
            found = ctx.settings.gradients(
                of_way(way), *(_converted(each, way, ctx.dtype) for each in (first, second)), needed[:2]
            )
            of_bias = None
            if needed[2]:
                channels = gradient.dim() - second.dim() + 1
                others = [at for at in range(gradient.dim()) if at != channels]
                of_bias = of_way.widest.sum(others, dtype=torch.float32)
        pairs = zip((*found, of_bias), ctx.dtypes, strict=True)
        return None, None, *(None if each is None else each.to(dtype) for each, dtype in pairs)


class ConvolutionSettings(NamedTuple):
    """The arguments of a convolution that are no tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def gradients(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needed: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of images and weight, all in one dtype."""
        is_batch = x.dim() == weight.dim()
        if not is_batch:
            gradient, x = gradient.unsqueeze(0), x.unsqueeze(0)
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.padding),
            self.groups,
            [*needed, False],
        )
        of_x = of_x if needed[0] else None
        if of_x is not None and not is_batch:
            of_x = of_x.squeeze(0)
        return of_x, of_weight if needed[1] else None
