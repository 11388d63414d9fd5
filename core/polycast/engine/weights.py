"""Which tensors are weights, and when a cast of one may be kept."""

import torch

from ..torch_internals.names import (
    are_functorch_transforms_active,
    dispatch_mode_count,
    is_forward_ad_active,
    storage_use_count,
    tracing_state,
)

STALE = (
    "A weight was changed in a way that its version counter does not show (a write through .data), so the cast that "
    "the WeightCache kept is stale. Call clear() on the cache after such a write."
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
        and not is_rewritten(tensor)
    )


def _shares_its_storage(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return storage_use_count(storage._cdata) > 2  # the tensor, and the object that was just made


def is_part_of_a_buffer(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a part of memory that other tensors are on, too.

    One that was put there through ``.data`` counts its own versions, so a write through the whole of it is not seen.
    """
    size = tensor.untyped_storage().nbytes()
    return _shares_its_storage(tensor) and tensor.nbytes < size


def is_rewritten(weight: torch.Tensor) -> bool:
    """Return whether something may write a weight without counting a version, through another tensor on its storage."""
    return _shares_its_storage(weight) and storages_are_rewritten()


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
        or tracing_state() is not None
        or are_functorch_transforms_active()
        or is_forward_ad_active()
    )
