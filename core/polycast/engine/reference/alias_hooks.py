"""Hooks on what gives out the memory of a tensor to be written without a version: Tensor.data, numpy() and others.

What is kept of weights on that memory is dropped as it is given out; what is made of them while it is held is not kept.
torch has these in a class that cannot be changed. They are put into torch.Tensor, which inherits from it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals.patcher import Patch
from ..casts.weights import TensorBase
from ..disable_dynamo import disable_dynamo
from .store import note_alias

METHODS = ("numpy", "untyped_storage", "data_ptr", "set_")


def hook_aliases(patch: Patch) -> None:
    """Hook all of them; what somebody else has put into torch.Tensor stays."""
    hooks: dict[str, Any] = {"data": _data()} | {name: _method(name) for name in METHODS}
    for name, hook in hooks.items():
        if name not in vars(torch.Tensor):
            patch.replace(torch.Tensor, name, hook)


def _data() -> property:
    torchs = vars(TensorBase)["data"]

    def get(tensor: torch.Tensor) -> Any:
        data = torchs.__get__(tensor)
        note_alias(tensor)
        return data

    return property(get, torchs.__set__, torchs.__delete__, torchs.__doc__)


def _method(name: str) -> Callable[..., Any]:
    torchs = vars(TensorBase)[name]

    @functools.wraps(torchs)
    @disable_dynamo  # which does not trace torch's either, but would say so
    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = torchs(tensor, *args, **kwargs)
        note_alias(tensor)
        return result

    method.__module__, method.__qualname__ = "torch", f"Tensor.{name}"  # which find it, to pickle it
    return method
