"""The arguments of convolutions by axis."""

from collections.abc import Sequence
from typing import Any


def by_axis(given: Any, axes: int) -> list[Any]:
    """Return a number for each axis, given those, or one for all axes."""
    numbers = list(given) if isinstance(given, Sequence) else [given]
    return numbers * axes if len(numbers) == 1 else numbers


def kernel_spans(dilations: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Return how far apart the first and the last element of a dilated kernel are on each axis.

    Padding by the name ``"same"`` adds as much, on both sides together.
    """
    return [step * (size - 1) for step, size in zip(dilations, kernel, strict=True)]
