"""Hooks on what gives out the memory of a tensor to be written without a version: Tensor.data, numpy() and others.

What is kept of weights on that memory is dropped as it is given out; what is made of them while it is held is not kept.
torch has these in a class that cannot be changed, torch._C.TensorBase. They are put into torch.Tensor, which inherits
from it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..disable_dynamo import disable_dynamo
from ..weights import TensorBase

METHODS = ("numpy", "untyped_storage", "data_ptr", "set_")


class AliasHooks:
    """The hooks, in torch.Tensor from construction until :meth:`remove`.

    Args:
        note_alias: called with a tensor whose memory was given out.
    """

    def __init__(self, note_alias: Callable[[torch.Tensor], None]) -> None:
        self._note_alias = note_alias
        hooks: dict[str, Any] = {"data": self._data()} | {name: self._method(name) for name in METHODS}
        # What somebody else has put there stays.
        self._hooks = {name: hook for name, hook in hooks.items() if name not in vars(torch.Tensor)}
        for name, hook in self._hooks.items():
            setattr(torch.Tensor, name, hook)

    def _data(self) -> property:
        torchs = vars(TensorBase)["data"]

        def get(tensor: torch.Tensor) -> Any:
            data = torchs.__get__(tensor)
            self._note_alias(tensor)
            return data

        return property(get, torchs.__set__, torchs.__delete__, torchs.__doc__)

    def _method(self, name: str) -> Callable[..., Any]:
        torchs = vars(TensorBase)[name]

        @functools.wraps(torchs)
        @disable_dynamo  # which does not trace torch's either, but would say so
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = torchs(tensor, *args, **kwargs)
            self._note_alias(tensor)
            return result

        method.__module__, method.__qualname__ = "torch", f"Tensor.{name}"  # which find it, to pickle it
        return method

    def remove(self) -> None:
        """Take the hooks out; what somebody has put in place of one stays."""
        for name, hook in self._hooks.items():
            if vars(torch.Tensor).get(name) is hook:
                delattr(torch.Tensor, name)
        self._hooks = {}
