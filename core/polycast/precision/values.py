"""The tensors in what models take and return: in containers, dataclasses, and objects such as a key-value cache."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

_T = TypeVar("_T")


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value, each with how it is reached: ``logits``, ``[0]``, ``cache.layers[1].keys``."""
    yield from _tensors_in(value, name, set())


def _tensors_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if isinstance(value, Mapping):
        parts = [(_joined(name, key) if isinstance(key, str) else f"{name}[{key!r}]", value[key]) for key in value]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [(_joined(name, key), getattr(value, key)) for key in value._fields]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{name}[{position}]", item) for position, item in enumerate(value)]
    elif isinstance(value, (type, torch.nn.Module)) or callable(value) or not hasattr(value, "__dict__"):
        return
    else:
        parts = [(_joined(name, key), item) for key, item in vars(value).items()]
    if id(value) not in seen:
        seen.add(id(value))
        for part, item in parts:
            yield from _tensors_in(item, part, seen)


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


class _Cloning(TorchFunctionMode):
    """Has deepcopy take tensors that autograd made, which it refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return args[0].detach().clone().requires_grad_(args[0].requires_grad)
        return func(*args, **(kwargs or {}))


def copied(value: _T, model: torch.nn.Module) -> _T:
    """Return a copy of a value, its tensors too; the modules of a model that are in it stay those of the model."""
    memo: dict[int, Any] = {id(module): module for module in model.modules()}
    with _Cloning():
        return copy.deepcopy(value, memo)


def in_float32(value: Any) -> Any:
    """Return a value with the tensors of reduced precision in its containers cast to float32."""
    if isinstance(value, torch.Tensor):
        reduced = value.is_floating_point() and value.dtype not in (torch.float32, torch.float64)
        return value.float() if reduced else value
    if type(value) in (list, tuple):
        return type(value)(in_float32(item) for item in value)
    if type(value) is dict:
        return {key: in_float32(item) for key, item in value.items()}
    return value


class State(tuple[tuple[torch.Tensor, int], ...]):
    """Tells whether the tensors in a value are those that they were, and unwritten."""

    @classmethod
    def of(cls, value: object) -> "State":
        """Return what the tensors in a value are now."""
        return cls((tensor, _version(tensor)) for _, tensor in tensors_in(value))

    def is_still_that_of(self, value: object) -> bool:
        """Say whether nothing has been written to a value since."""
        now = State.of(value)
        return len(now) == len(self) and all(
            tensor is other and version == before for (tensor, version), (other, before) in zip(now, self, strict=True)
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
