"""The casts of weights that a thread's regions keep, so that a weight used twice in a region is cast once.

torch's own cache is one for the process, keyed by the tensor alone. An entry here belongs to one thread, and holds
while the weight is alive and is what it was: the same version, the same memory. Casts to several dtypes live side by
side. All is dropped when the thread leaves its outermost region.
"""

import weakref
from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class _Entry:
    weight: "weakref.ref[torch.Tensor]"
    version: int
    data_ptr: int
    cast: torch.Tensor

    def serves(self, weight: torch.Tensor) -> bool:
        """Say whether the cast is still that of `weight`, and can be used in the grad mode of now."""
        if (
            self.weight() is not weight
            or self.version != weight._version
            or self.data_ptr != weight.data_ptr()
            or (self.cast.is_inference() and not torch.is_inference_mode_enabled())
        ):
            return False
        # A cast made under no_grad has no way back to the weight: where a gradient is wanted it is made anew.
        return self.cast.requires_grad or not (weight.requires_grad and torch.is_grad_enabled())


class RegionCache:
    """Casts of weights by weight and dtype."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `weight` in `dtype`: a kept cast if it still holds, else a new one, which is kept."""
        key = (id(weight), dtype)
        entry = self._entries.get(key)
        if entry is None or not entry.serves(weight):
            entry = _Entry(weakref.ref(weight), weight._version, weight.data_ptr(), weight.to(dtype))
            self._entries[key] = entry
        return entry.cast

    def clear(self) -> None:
        """Drop every cast."""
        self._entries.clear()


def is_weight(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a weight, whose casts are worth keeping.

    Weights are float32 leaves: those that require grad, and parameters that do not (frozen ones). Subclasses other than
    Parameter are cast anew each time, so that their own dispatch sees it.
    """
    kind = type(tensor)
    return (
        tensor.dtype is torch.float32
        and (kind is torch.nn.Parameter or (kind is torch.Tensor and tensor.requires_grad))
        and tensor.is_leaf
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and not tensor._is_view()
    )


def caching_is_safe() -> bool:
    """Say whether a cast made now may serve later calls: not while something records, transforms or watches the ops."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )
