"""Cast the tensors that a module returns."""

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ..engine.reference.rules import is_eligible
from ..torch_internals.private_names import tree_map
from .cast_containers import ByIdentity


class CastResult:
    """Casts the tensors in one result, including those in dataclasses and in containers that torch's pytrees know.

    A container in which a tensor is cast is copied, since the module may keep it. A tensor that occurs twice is cast
    once.

    Args:
        device_type, dtype: eligible tensors on this device are cast to this dtype.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type, self._dtype = device_type, dtype
        self._casts = ByIdentity()

    def of(self, value: Any, around: tuple[Any, ...] = ()) -> Any:
        """Return the result, or a value in it, with its tensors cast; `around` are the dataclasses that contain it."""
        if isinstance(value, torch.Tensor):
            return self._cast(value)
        changed = False

        def convert(leaf: Any) -> Any:
            nonlocal changed
            cast = self._leaf(leaf, around)
            changed = changed or cast is not leaf
            return cast

        converted = tree_map(convert, value)
        return converted if changed else value

    def _leaf(self, leaf: Any, around: tuple[Any, ...]) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._cast(leaf)
        if not is_dataclass(leaf) or isinstance(leaf, type) or any(each is leaf for each in around):
            return leaf
        items = [(field.name, getattr(leaf, field.name, None)) for field in fields(leaf)]
        casts = [(name, item, self.of(item, (*around, leaf))) for name, item in items]
        changed = [(name, cast) for name, item, cast in casts if cast is not item]
        if not changed:
            return leaf
        copied = copy.copy(leaf)
        for name, cast in changed:
            object.__setattr__(copied, name, cast)  # also if it is frozen
        return copied

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is self._dtype or not is_eligible(tensor, self._device_type):
            return tensor
        known: torch.Tensor | None = self._casts.get(tensor)
        if known is None:
            known = tensor.to(self._dtype)
            self._casts.add(tensor, known)
        return known
