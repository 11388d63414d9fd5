"""Running a model so that nobody sees it afterwards: what its forward writes is written to copies.

What can be written, and what becomes of it:

- buffers, and attributes that are tensors: the originals are put aside, and the model runs on clones;
- attributes that are set, such as counters and what a layer remembers: they are what they were before;
- arguments: the model gets copies (see ``calls.py``);
- the state of random number generators: set back;
- gradients: nothing is recorded;
- parameters: a forward that writes them is refused, for clones of all of them would double the model. What is changed
  inside a list or an object that a module keeps is not seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..region.capture import Snapshot


class Slot(NamedTuple):
    """Where a module keeps something: one of its dicts, and the key."""

    owner: dict[str, Any]
    key: str

    def get(self) -> Any:
        """Return what is kept."""
        return self.owner.get(self.key, _ABSENT)

    def put(self, value: Any) -> None:
        """Keep a value, or nothing."""
        if value is not _ABSENT:
            self.owner[self.key] = value
        else:
            self.owner.pop(self.key, None)


_ABSENT: Any = object()
Values = list[Any]


@contextmanager
def isolated() -> Iterator[None]:
    """Run a block outside of the caller's regions, without gradients.

    ``inference_mode`` is left too: tensors that are made in it have no versions, so writes to them could not be seen,
    and only code in it may write to them, which another thread is not.
    """
    with torch.inference_mode(False), torch.no_grad(), Snapshot(()).apply():
        yield


class ModelState:
    """What a model's forward writes, besides its outputs: places in its modules."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots

    def __bool__(self) -> bool:
        return bool(self._slots)

    def current(self) -> Values:
        """Return what is kept now, itself."""
        return [slot.get() for slot in self._slots]

    def cloned(self) -> Values:
        """Return clones of what is kept now: other tensors, the same values."""
        clones: dict[int, Any] = {}
        return [_clone(slot.get(), clones) for slot in self._slots]

    def put(self, values: Values) -> None:
        """Keep other values."""
        for slot, value in zip(self._slots, values, strict=True):
            slot.put(value)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Run a block on clones of what is kept now."""
        before = self.current()
        self.put(self.cloned())
        try:
            yield
        finally:
            self.put(before)


def written_state(model: torch.nn.Module, run: Any) -> tuple[Any, ModelState]:
    """Run something that calls a model, and return what it returns, and what of the model it wrote. Nothing stays.

    Raises:
        RuntimeError: the model writes to its parameters.
    """
    dicts = [owner for module in model.modules() for owner in (vars(module), vars(module).get("_buffers"))]
    kept = [(owner, dict(owner)) for owner in dicts if type(owner) is dict]
    parameters = [(name, parameter, _version(parameter)) for name, parameter in model.named_parameters()]
    tensors = [Slot(owner, key) for owner, said in kept for key, value in said.items() if _is_tensor(value)]
    originals, clones = [slot.get() for slot in tensors], dict[int, Any]()
    for slot in tensors:
        slot.put(_clone(slot.get(), clones))
    put = [(slot, slot.get(), said) for slot, said in zip(tensors, originals, strict=True)]
    try:
        result = run()
        # Not every kernel that writes counts a version: batch norm's does not.
        slots = [slot for slot, clone, said in put if slot.get() is not clone or not torch.equal(clone, said)]
        tensors_at = {(id(slot.owner), slot.key) for slot in tensors}
        for owner, said in kept:
            for key in {**said, **owner}:
                is_other = owner.get(key, _ABSENT) is not said.get(key, _ABSENT)
                if is_other and (id(owner), key) not in tensors_at:
                    slots.append(Slot(owner, key))
    finally:
        for owner, said in kept:
            for key in [key for key in owner if key not in said]:
                del owner[key]
            for key, value in said.items():
                if owner.get(key, _ABSENT) is not value:
                    owner[key] = value
    for name, parameter, version in parameters:
        if _version(parameter) != version:
            raise RuntimeError(
                f"the model's forward writes to its parameter {name!r} (as nn.Embedding does with max_norm), so it is "
                "not the same from one run to the next. Take out what writes it, or run the model on a copy."
            )
    return result, ModelState(slots)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def _clone(value: Any, clones: dict[int, Any]) -> Any:
    if not _is_tensor(value):
        return value
    if id(value) not in clones:
        clones[id(value)] = value.detach().clone()
    return clones[id(value)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class RandomState:
    """The state of the generators that a model on a device draws from."""

    def __init__(self, device_type: str) -> None:
        device = torch.get_device_module(device_type)
        self._modules = [torch.random, *([device] if hasattr(device, "get_rng_state") else [])]

    def get(self) -> list[torch.Tensor]:
        """Return the state of now."""
        return [module.get_rng_state() for module in self._modules]

    def set(self, states: list[torch.Tensor]) -> None:
        """Have the generators go on from a state."""
        for module, state in zip(self._modules, states, strict=True):
            module.set_rng_state(state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Have the generators be in the state of now again after a block."""
        before = self.get()
        try:
            yield
        finally:
            self.set(before)
