"""Hooks on methods that expose a tensor's memory to writes which change no version, or write so themselves.

They drop the cached casts of weights on that memory; later casts are not cached while it is held. torch defines the
methods in a class that cannot be changed, so the hooks are added to its subclass torch.Tensor.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals.patcher import Patch
from ...torch_internals.private_names import disable_dynamo
from ..casts.weights import TensorBase
from .invalidation import note_alias

METHODS = ("numpy", "untyped_storage", "data_ptr", "apply_", "map_", "map2_")


def hook_aliases(patch: Patch) -> None:
    """Install the hooks, except where something else has replaced a method of torch.Tensor."""
    hooks: dict[str, Any] = {"data": _data()} | {name: _method(name) for name in METHODS}
    for name, hook in hooks.items():
        if name not in vars(torch.Tensor):
            patch.replace(torch.Tensor, name, hook)
    clear_method_lists()


def clear_method_lists() -> None:
    """Clear torch's lists of the methods of tensors, some of which were replaced."""
    for name in ("get_testing_overrides", "_get_overridable_functions", "_get_tensor_methods"):
        clear = getattr(getattr(torch.overrides, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def _data() -> property:
    torchs = vars(TensorBase)["data"]

    def data(tensor: torch.Tensor) -> Any:
        alias = torchs.__get__(tensor)
        note_alias(tensor)
        return alias

    return property(data, torchs.__set__, torchs.__delete__, torchs.__doc__)


def _method(name: str) -> Callable[..., Any]:
    torchs = vars(TensorBase)[name]

    @functools.wraps(torchs)
    @disable_dynamo  # it does not trace torch's either, but would report it
    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return torchs(tensor, *args, **kwargs)
        finally:
            note_alias(tensor)

    method.__module__, method.__qualname__ = "torch", f"Tensor.{name}"  # for pickle
    return method
