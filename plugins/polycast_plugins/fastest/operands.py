"""`MeasuredWay`, a way to compute ops, and `Operands`, the activations and weights for measurements."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch

from polycast.plugin import LowBitKernel

_BYTES = 2**27
"""The memory of the weights: more than a processor's cache, so that each weight is read from memory, as in a model."""
SMALL = 2**15
"""Weights of fewer elements stay in the cache."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class MeasuredWay:
    """A way to compute ops.

    Attributes:
        name: as in a `Measurement`.
        dtype: the dtype of the activations, and of the weights unless a kernel prepacks them.
        fast: the fast dtype that a kernel returns.
        kernels: the first kernel of each op; None: torch's are used.
    """

    name: str
    dtype: torch.dtype
    fast: torch.dtype
    kernels: Mapping[str, LowBitKernel] | None = None


class Operands:
    """Activations and weights on a device. Weights of all shapes and dtypes lie in one buffer, and are used in turn."""

    def __init__(self, device_type: str) -> None:
        self.device = torch.device(device_type)
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**15), 2**15, (2**20,), dtype=torch.int16, generator=generator, device="cpu")
        # So each element is a normal number of moderate size as float32 (with its neighbour), bfloat16 and float16.
        bits = bits.bitwise_and_(-0x7C01).bitwise_or_(0x3C00)
        self._buffer = bits.to(self.device).repeat(_BYTES // bits.nbytes)
        self._position = 0
        self._kept: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what a function returned when it was first called for a key."""
        if key not in self._kept:
            self._kept[key] = make()
        found: _T = self._kept[key]
        return found

    def activations(self, *shapes: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return views of the shared buffer in these shapes, one after the other from its beginning.

        Calls return overlapping views: do not write to them.
        """
        ends = list(accumulate(map(math.prod, shapes)))
        parts = zip([0, *ends], ends, shapes, strict=False)
        return tuple(self._buffer.view(dtype)[begin:end].view(shape) for begin, end, shape in parts)

    def weights(self, *shape: int, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Return all weights of a shape and dtype that the buffer has room for; of a small shape, one."""
        return self.kept((shape, dtype), lambda: self._weights(shape, dtype))

    def _weights(self, shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        count = math.prod(shape)
        elements = self._buffer.view(dtype)
        if self.is_small(count):
            return [elements[:count].view(shape)]
        return list(elements[: elements.numel() // count * count].view(-1, *shape))

    def is_small(self, size: int) -> bool:
        """Return whether there is only one weight of this many elements."""
        return size < SMALL

    def whole(self) -> torch.Tensor:
        """Return the buffer as float32."""
        return self._buffer.view(torch.float32)

    def in_turn(self, weights: Sequence[_T], nbytes: int) -> Callable[[], _T]:
        """Return a function that returns the next weight, or what it is prepacked into: that read longest ago.

        Each takes `nbytes` in the buffer.
        """
        if len(weights) == 1:
            return lambda: weights[0]

        def next_weight() -> _T:
            position = self._position
            self._position = (position + nbytes) % _BYTES
            return weights[position // nbytes % len(weights)]

        return next_weight
