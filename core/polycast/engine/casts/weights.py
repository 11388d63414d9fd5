"""Which tensors are weights or views of weights, and when a cast of one may be kept."""

import functools
import sys
from typing import Any, NamedTuple

import torch

from ...torch_internals.names import (
    are_functorch_transforms_active,
    behind_functional_tensor,
    dispatch_mode_count,
    is_forward_ad_active,
    is_tracing,
    storage_use_count,
    tensor_base,
)

TensorBase: Any = tensor_base
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
        and not tensor._is_view()  # before is_leaf, which torch refuses to say of some views
        and tensor.is_leaf
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_inference()
        and not tensor.is_neg()
    )


def weight_of(tensor: torch.Tensor, *, to_pack: bool = False) -> torch.Tensor | None:
    """Return the weight that a tensor is or is a plain view of, or None; see :func:`is_weight`.

    autograd knows what a view was made of, in each grad mode. A view that was detached, or has another dtype, is a
    tensor of its own to it. Either may have been given other memory since the view was made.
    """
    if is_weight(tensor, to_pack=to_pack):
        return tensor
    base = tensor._base
    if base is None or not is_weight(base, to_pack=to_pack):
        return None
    is_plain = (
        type(tensor) is torch.Tensor
        and tensor.dtype is base.dtype
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and not tensor.is_neg()
        and tensor._version == base._version
        and tensor.numel() <= base.numel()  # elements that are seen several times are not worth a cast of each
        and _storage_of(tensor) == _storage_of(base)
    )
    return base if is_plain else None


def is_all_of(view: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a view has each element of a weight once, and so is the weight in other sizes and strides."""
    return (
        view.numel() == weight.numel()
        and view.storage_offset() == weight.storage_offset()
        and is_dense(view)
        and is_dense(weight)
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, each in a place of its own: so do those of a cast of it."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def parameter_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter that a tensor is or is a plain view of, or None, of what stands for tensors as of tensors.

    Such are fake tensors, and what functionalization wraps them in: these have no versions.
    """
    if isinstance(_unwrapped(tensor), torch.nn.Parameter):
        return tensor
    base = tensor._base
    if base is None or base.layout is not torch.strided or not isinstance(_unwrapped(base), torch.nn.Parameter):
        return None
    is_plain = (
        tensor.dtype is base.dtype
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))
        and _storage_of(_unwrapped(tensor)) == _storage_of(_unwrapped(base))
    )
    return base if is_plain else None


def _storage_of(tensor: torch.Tensor) -> int:
    identity: int = TensorBase.untyped_storage(tensor)._cdata
    return identity


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    behind = behind_functional_tensor(tensor)
    return tensor if behind is None else behind


class Source(NamedTuple):
    """What is cast or packed, and what that is kept for: a weight, for itself, or a view, for its weight."""

    tensor: torch.Tensor
    weight: torch.Tensor
    holders: int = 1
    """How many tensors that hold the memory are known: the weight, and the view that is used now."""

    @property
    def place(self) -> tuple[object, ...]:
        """Where the view lies; () for the weight itself."""
        return () if _place(self.tensor) == _place(self.weight) else _place(self.tensor)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def has_other_holders(weight: torch.Tensor, known: int = 1) -> bool:
    """Say whether anything but a weight holds its memory, or but `known` tensors: a tensor, a storage, an array.

    Each may write it without counting a version of the weight; Python cannot tell which of them count it.
    """
    (uses, objects), (uses_of_one, objects_of_one) = _references(weight), _references_of_one()
    return uses > uses_of_one + known - 1 or objects > objects_of_one


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often a storage is held, and Python's object of it, which is made here or was before."""
    storage = TensorBase.untyped_storage(tensor)
    return storage_use_count(storage._cdata), sys.getrefcount(storage)


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
        dispatch_mode_count()
        or torch.compiler.is_compiling()
        or is_tracing()
        or are_functorch_transforms_active()
        or is_forward_ad_active()
    )
