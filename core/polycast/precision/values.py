"""The tensors in inputs and outputs of models: in containers, dataclasses, and objects such as a key-value cache."""

import copy
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ..engine.overlap import overlap
from ..torch_internals.private_names import version_of

_T = TypeVar("_T")


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value with their paths: ``logits``, ``[0]``, ``cache.layers[1].keys``."""
    for path, each in _walk(value, name, set()):
        if isinstance(each, torch.Tensor):
            yield path, each


def _walk(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield a value and the values in it with their paths. A value with several paths is entered once."""
    yield name, value
    if isinstance(value, torch.Tensor) or id(value) in seen:
        return
    parts = _parts(value, name)
    if parts is not None:
        seen.add(id(value))
        for path, part in parts:
            yield from _walk(part, path, seen)


def _parts(value: Any, name: str) -> list[tuple[str, Any]] | None:
    """Return the items of a container, or the attributes of an object, with their paths; None for other values."""
    if isinstance(value, Mapping):
        return [(_joined(name, key) if isinstance(key, str) else f"{name}[{key!r}]", value[key]) for key in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(_joined(name, key), getattr(value, key)) for key in value._fields]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(f"{name}[{position}]", item) for position, item in enumerate(value)]
    if isinstance(value, (type, torch.nn.Module)) or callable(value):
        return None
    attributes = {key: getattr(value, key) for key in _slots(type(value)) if hasattr(value, key)}
    if not attributes and not hasattr(value, "__dict__"):
        return None
    return [(_joined(name, key), item) for key, item in {**attributes, **getattr(value, "__dict__", {})}.items()]


def _slots(cls: type) -> list[str]:
    """Return the names in the ``__slots__`` of a user's class and its bases."""
    if cls.__module__ == "builtins":
        return []
    slots = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return [name for name in names if not name.startswith("__")]


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


class _Cloning(TorchFunctionMode):
    """Lets deepcopy accept non-leaf tensors, and clones tensors without the rest of their storage.

    Args:
        aliases: the ids of tensors that overlap others; their storage is copied, once for all of them.
    """

    def __init__(self, aliases: Collection[int], keeps_gradients: bool) -> None:
        super().__init__()
        self._aliases, self._keeps_gradients = aliases, keeps_gradients
        self._alive: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        detached = tensor.detach()
        if id(tensor) not in self._aliases:
            return detached.clone().requires_grad_(tensor.requires_grad and self._keeps_gradients)
        self._alive.append(detached)  # the memo has its id
        requires_grad = tensor.requires_grad and self._keeps_gradients
        return func(detached, memo).requires_grad_(requires_grad)  # type: ignore[no-untyped-call]


def copied(value: _T, model: torch.nn.Module, *, keeps_gradients: bool = True) -> _T:
    """Return a deep copy of a value, in which modules of the model are not copied.

    Tensors in it require gradients as the originals do, or none.
    """
    memo: dict[int, Any] = {id(module): module for module in model.modules()}
    with _Cloning(_aliases(value), keeps_gradients):
        return copy.deepcopy(value, memo)


def cloned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return clones of tensors; those of tensors that overlap do so, too."""
    with _Cloning(_aliases(tensors), keeps_gradients=False):
        return copy.deepcopy(tensors)


def replaced(value: _T, tensors: Mapping[int, object], modules: Mapping[int, torch.nn.Module]) -> _T:
    """Return a deep copy of a value with other objects in place of its tensors, and with modules that are not copied.

    Args:
        value: any value.
        tensors: by the id of a tensor, what takes its place.
        modules: by id, the modules.
    """
    return copy.deepcopy(value, {**modules, **tensors})


def _aliases(value: object) -> set[int]:
    """Return the ids of the tensors in a value that overlap others in it."""
    by_storage: dict[int, dict[int, torch.Tensor]] = {}
    for _, tensor in tensors_in(value):
        with suppress(NotImplementedError):  # sparse tensors and some subclasses have no storage
            by_storage.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return {
        key
        for tensors in by_storage.values()
        for key, one in tensors.items()
        if any(one is not other and overlap(one, other) for other in tensors.values())
    }


class Contents:
    """The values in a value, and the versions of its tensors, for detecting writes."""

    def __init__(self, value: object) -> None:
        held = _walk(value, "", set())
        self._held = [(path, each, version_of(each) if isinstance(each, torch.Tensor) else 0) for path, each in held]

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the tensors."""
        return {each.dtype for _, each, _ in self._held if isinstance(each, torch.Tensor)}

    def differ_from(self, value: object) -> bool:
        """Return whether a value has been written to since."""
        now = Contents(value)._held
        return len(now) != len(self._held) or any(
            one is not two or (path, version) != (path_before, version_before)
            for (path, one, version), (path_before, two, version_before) in zip(now, self._held, strict=True)
        )

    def written(self) -> set[str]:
        """Return the paths of the tensors that have been written to since."""
        return {
            path for path, each, version in self._held if isinstance(each, torch.Tensor) and version_of(each) != version
        }
