"""Which tensors are weights, and when a cast of one may be kept."""

import functools
import sys
from typing import Any

import torch
from torch.autograd import forward_ad

TensorBase: Any = torch._C.TensorBase
"""What torch.Tensor inherits from; its methods are torch's own, whatever torch.Tensor has in their place."""

STALE = (
    "A weight was changed in a way that nothing shows (a write at a raw pointer), so the cast that the WeightCache "
    "kept is stale. Call clear() on the cache after such a write."
)


_PACKED = (torch.float32, torch.bfloat16, torch.float16)


def is_weight(tensor: torch.Tensor, *, to_pack: bool = False) -> bool:
    """Say whether a tensor is a weight, whose casts are worth keeping; `to_pack`: or which a recipe may pack.

    Weights are float32 leaves: those that require grad, and parameters that do not (frozen ones). Subclasses other than
    Parameter are cast anew each time, so that their own dispatch sees it; and so are the weights that FSDP gathers.
    """
    kind = type(tensor)
    return (
        (tensor.dtype in _PACKED if to_pack else tensor.dtype is torch.float32)
        and (kind is torch.nn.Parameter or (kind is torch.Tensor and tensor.requires_grad))
        and tensor.is_leaf
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_inference()
        and not tensor._is_view()
        and not tensor.is_neg()
    )


def has_other_holders(weight: torch.Tensor) -> bool:
    """Say whether anything but a weight holds its memory: another tensor, a storage, an array.

    Each may write it without counting a version of the weight; Python cannot tell which of them count it.
    """
    return any(count > alone for count, alone in zip(_references(weight), _references_of_one(), strict=True))


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often a storage is held, and Python's object of it, which is made here or was before."""
    storage = TensorBase.untyped_storage(tensor)
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _references_of_one() -> tuple[int, int]:
    return _references(torch.Tensor())


def storages_are_rewritten() -> bool:
    """Say whether something may write a weight through another tensor on its storage without counting a version.

    FSDP gathers weights so, into memory that it frees between uses, and it needs a process group.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def caching_is_safe() -> bool:
    """Say whether a cast made now may serve later calls: not while something records, transforms or watches the ops."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
