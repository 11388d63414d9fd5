"""Recognize weights and views of weights, and decide when a cast of one may be cached."""

import torch

from ...torch_internals.private_names import (
    are_functorch_transforms_active,
    behind_functional_tensor,
    dispatch_mode_count,
    is_alias_of,
    is_cached_tensor,
    is_forward_ad_active,
    is_traced_by_modes,
    is_tracing,
)

STALE = (
    "A weight was changed without a trace (by a write at a raw pointer), so its cast in the WeightCache is stale. "
    "Call clear() on the cache after such a write."
)


_PREPACK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_weight(tensor: torch.Tensor, *, for_prepacking: bool = False) -> bool:
    """Return whether a tensor is a weight, whose casts may be cached; with `for_prepacking`, which may be prepacked.

    Weights are float32 leaves that require grad, and frozen parameters. Other subclasses than Parameter are cast at
    each use, so that their own dispatch sees it. So are weights that FSDP gathers and, as in torch, those that torch
    marks because their values change between uses.
    """
    kind = type(tensor)
    return (
        (tensor.dtype in _PREPACK_DTYPES if for_prepacking else tensor.dtype is torch.float32)
        and (kind is torch.nn.Parameter or (kind is torch.Tensor and tensor.requires_grad))
        and not tensor._is_view()  # before is_leaf, which torch refuses to say of some views
        and tensor.is_leaf
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_inference()
        and not tensor.is_neg()
        and not is_cached_tensor(tensor)
    )


def weight_of(tensor: torch.Tensor, *, for_prepacking: bool = False) -> torch.Tensor | None:
    """Return the weight that a tensor is or is a plain view of, or None; see :func:`is_weight`.

    autograd tracks views in each grad mode, except detached ones and those with another dtype. The view or the weight
    may have been moved to other memory since.
    """
    if is_weight(tensor, for_prepacking=for_prepacking):
        return tensor
    base = tensor._base
    if base is None or not is_weight(base, for_prepacking=for_prepacking):
        return None
    is_plain = (
        type(tensor) is torch.Tensor
        and tensor.dtype is base.dtype
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and not tensor.is_neg()
        and tensor._version == base._version
        and tensor.numel() <= base.numel()  # overlapping elements are not worth a cast of each
        and is_alias_of(tensor, base)
    )
    return base if is_plain else None


def covers(view: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a view has each element of a weight exactly once."""
    return (
        view.numel() == weight.numel()
        and view.storage_offset() == weight.storage_offset()
        and is_dense(view)
        and is_dense(weight)
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is non-overlapping and dense, so that a cast of it has the same strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def parameter_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter that a tensor is or is a plain view of, or None; also for traced tensors.

    These are fake tensors, and functionalization's wrappers of them, which have no versions.
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
        and is_alias_of(_unwrapped(tensor), _unwrapped(base))
    )
    return base if is_plain else None


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    behind = behind_functional_tensor(tensor)
    return tensor if behind is None else behind


def storages_are_rewritten() -> bool:
    """Return whether FSDP may be in use, which writes weights through other tensors on their storages.

    It gathers them into memory that it frees between uses, and needs a process group.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def caching_is_safe() -> bool:
    """Return whether no dispatch mode, compiler, tracer or transform intercepts the ops."""
    return not (dispatch_mode_count() or _are_transformed())


def only_modes_see_casts() -> bool:
    """Return whether dispatch modes intercept the ops, and nothing is known to trace or transform them."""
    return bool(dispatch_mode_count()) and not (is_traced_by_modes() or _are_transformed())


def _are_transformed() -> bool:
    return torch.compiler.is_compiling() or is_tracing() or are_functorch_transforms_active() or is_forward_ad_active()
