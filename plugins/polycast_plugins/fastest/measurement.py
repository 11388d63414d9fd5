"""`Measurement`: the time of an op; and `Omission`: what was not measured, and why."""

import math
from dataclasses import dataclass

FLOAT32 = "float32"
"""The name of the way that others are compared with."""
PREEMPTED = "other processes took the processor"
"""The reason of an omission of cases that were preempted each time that they were measured."""


@dataclass(frozen=True)
class Measurement:
    """The time of an op of one size, computed in one way.

    Attributes:
        op: ``"linear"`` (a weight [N, K]), ``"matmul"`` (a weight [K, N]), ``"conv2d"``, ``"small_conv2d"``
            (of one image of at most 20,480 numbers), ``"depthwise_conv2d"``, ``"bmm"``,
            ``"scaled_dot_product_attention"``, ``"scaled_dot_product_attention_backward"``, ``"lstm"``,
            ``"encoder_layer"`` (torch's fused op) or ``"cast"``.
        rows: the rows of the activations: for conv2d the positions of all output images, for bmm and attention the rows
            of each matrix, for lstm those of all steps, for casts the elements.
        way: ``"float32"``, a fast dtype such as ``"bfloat16"``, ``"bfloat16 kernel"`` for the backend's own kernel of
            it, or the kind of a recipe. For casts ``"to bfloat16"`` and ``"from bfloat16"``.
        seconds: of one call.
        size: the elements of the weight, or of what stands for it: 1 for casts.
        noisy: whether a second pass of measuring did not confirm it, or a call with more work took much less time.
        extrapolated: whether it was computed from other rows or sizes, because measuring it would take too long, or
            because float32 takes less than a third of the time there.
    """

    op: str
    rows: int
    way: str
    seconds: float
    size: int = 1
    noisy: bool = False
    extrapolated: bool = False


@dataclass(frozen=True)
class Omission:
    """A way in which an op was not measured, and why."""

    op: str
    way: str
    reason: str


def is_positive(value: object) -> bool:
    """Return whether a value is a positive finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def is_valid(each: Measurement) -> bool:
    """Return whether every attribute has its type and range."""
    return (
        isinstance(each.op, str)
        and isinstance(each.way, str)
        and isinstance(each.rows, int)
        and each.rows > 0
        and isinstance(each.size, int)
        and each.size > 0
        and is_positive(each.seconds)
        and isinstance(each.noisy, bool)
        and isinstance(each.extrapolated, bool)
    )
