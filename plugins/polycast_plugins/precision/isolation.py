"""Run a model without side effects: its forward writes to copies, and one call at a time uses it.

What a forward can write, and how it is undone:

- buffers and attributes that are tensors: the model runs on clones, and the originals are put back;
- other attributes, such as counters: restored;
- arguments: the model receives copies (see ``calls.py``);
- random number generators: restored;
- gradients: not recorded; with a loss, those of parameters are restored;
- parameters: a forward that writes to them is refused, because clones of all would double the model's memory. Changes
  inside of lists or objects that a module holds are not detected.
"""

import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from polycast import Snapshot
from polycast.plugin import hold_during_fork
from polycast_plugins.observe import RandomState

from .values import cloned, version_of

_T = TypeVar("_T")
_ABSENT: Any = object()
_SAMPLES = 64
"""The numbers of a parameter that are compared, evenly spaced."""
Values = list[Any]
_users: dict[int, object] = {}
"""By the id of a module, what identifies the call that uses it."""
_lock = threading.Lock()
hold_during_fork(lambda: [_lock])
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_users.clear)  # the threads that use them are not in the child


class StateSlot(NamedTuple):
    """An attribute or a buffer of a module: one of its dicts, and the key."""

    owner: dict[str, Any]
    key: str

    def get(self) -> Any:
        """Return the value, or a marker of its absence."""
        return self.owner.get(self.key, _ABSENT)

    def put(self, value: Any) -> None:
        """Set what :meth:`get` has returned."""
        if value is not _ABSENT:
            self.owner[self.key] = value
        else:
            self.owner.pop(self.key, None)


def outside_regions() -> AbstractContextManager[object]:
    """Return a context manager in which no region is open."""
    return Snapshot(()).apply()


class ModelState:
    """The attributes and buffers of a model that its forward writes."""

    def __init__(self, slots: list[StateSlot]) -> None:
        self._slots = slots

    def with_slots_of(self, other: "ModelState") -> "ModelState":
        """Return the state that either of two runs writes."""
        slots = {(id(slot.owner), slot.key): slot for slot in (*self._slots, *other._slots)}
        return ModelState(list(slots.values()))

    def current(self) -> Values:
        """Return the current values."""
        return [slot.get() for slot in self._slots]

    def cloned(self) -> Values:
        """Return the current values, tensors as clones."""
        return _cloned(self.current())

    def inside(self, module: torch.nn.Module) -> "ModelState":
        """Return the part of the state that is a module's, or that of a module in it."""
        if not self._slots:
            return self
        owners = {id(owner) for each in module.modules() for owner in (vars(each), vars(each).get("_buffers"))}
        return ModelState([slot for slot in self._slots if id(slot.owner) in owners])

    def put(self, values: Values) -> None:
        """Set all values."""
        for slot, value in zip(self._slots, values, strict=True):
            slot.put(value)

    @contextmanager
    def on_clones(self) -> Iterator[None]:
        """Run a block on clones of the current values."""
        before = self.current()
        self.put(self.cloned())
        try:
            yield
        finally:
            self.put(before)


@contextmanager
def isolated(random: RandomState, state: ModelState | None = None) -> Iterator[None]:
    """Run a block outside of the caller's regions, without gradients, and restore random number generators after it.

    It also leaves ``inference_mode``: tensors made in it have no versions, so that writes to them are not detected, and
    other threads, which are not in it, may not write to them. The block runs on clones of `state`.
    """
    generators, on_clones = random.preserved(), (state or ModelState([])).on_clones()
    with torch.inference_mode(False), torch.no_grad(), outside_regions(), generators, on_clones:
        yield


def find_writes(model: torch.nn.Module, run: Callable[[], _T]) -> tuple[_T, ModelState]:
    """Call a function that calls a model, undo what it writes, and return its result and the written state.

    A model that writes to its parameters is refused.
    """
    dicts = [owner for module in model.modules() for owner in (vars(module), vars(module).get("_buffers"))]
    before = [(owner, dict(owner)) for owner in dicts if isinstance(owner, dict)]
    parameters = [_Parameter(name, parameter) for name, parameter in model.named_parameters()]
    tensors = [StateSlot(owner, key) for owner, values in before for key, value in values.items() if _is_tensor(value)]
    state = ModelState(tensors)
    originals, clones = state.current(), state.cloned()
    state.put(clones)
    try:
        result = run()
        # Compare values, because not every kernel that writes increments the version: batch norm's does not.
        slots = [
            slot
            for slot, clone, value in zip(tensors, clones, originals, strict=True)
            if slot.get() is not clone or _differs(clone, value)
        ]
        tensors_at = {(id(slot.owner), slot.key) for slot in tensors}
        for owner, values in before:
            for key in {**values, **owner}:
                is_other = owner.get(key, _ABSENT) is not values.get(key, _ABSENT)
                if is_other and (id(owner), key) not in tensors_at:
                    slots.append(StateSlot(owner, key))
    finally:
        for owner, values in before:
            for key in [key for key in owner if key not in values]:
                del owner[key]
            for key, value in values.items():
                if owner.get(key, _ABSENT) is not value:
                    owner[key] = value
    for each in parameters:
        if each.is_written():
            raise RuntimeError(
                f"the model's forward writes to its parameter {each.name!r} (as nn.Embedding does with max_norm), so "
                "runs differ from each other. Remove the write, or run the model on a copy."
            )
    return result, ModelState(slots)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def _cloned(values: Values) -> Values:
    """Return values with a clone in place of each tensor."""
    tensors = {id(value): value for value in values if _is_tensor(value)}
    clones = dict(zip(tensors, cloned(list(tensors.values())), strict=True))
    return [clones.get(id(value), value) for value in values]


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors differ, or torch cannot say, as of sparse ones and of those on meta."""
    try:
        return not torch.equal(one, other)
    except RuntimeError:
        return True


class _Parameter:
    """A parameter as it is now, to detect writes: by its version, its memory and, of those to its data, a sample."""

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.name, self._parameter = name, parameter
        self._before = self._contents()

    def is_written(self) -> bool:
        """Return whether the parameter was written since."""
        *before, sample_before = self._before
        *now, sample = self._contents()
        return before != now or (sample is not None and not torch.equal(sample, sample_before))

    def _contents(self) -> list[Any]:
        """Return the version and, of a plain parameter, the address, and a sample of the values as bytes."""
        parameter = self._parameter
        plain = parameter.detach()
        version, count = version_of(parameter), min(_SAMPLES, plain.numel())
        if type(plain) is not torch.Tensor or plain.layout is not torch.strided or plain.is_meta or not count:
            return [version, 0, None]
        places = torch.arange(count, device=plain.device) * (plain.numel() - 1) // max(count - 1, 1)
        try:
            sample = plain.take(places).view(torch.uint8)
        except RuntimeError:  # torch has no such kernel for its dtype
            sample = None
        return [version, plain.data_ptr(), sample]


class Situation:
    """What a call can depend on besides its arguments: random numbers, context, and state of the model."""

    def __init__(self, generators: RandomState, state: ModelState) -> None:
        self.random = generators.get()
        self.context = contextvars.copy_context()
        self.state, self._values = state, state.cloned()

    def cloned(self) -> Values:
        """Return the state, tensors as clones, because the call may write to it."""
        return _cloned(self._values)


@contextmanager
def in_use(*models: torch.nn.Module) -> Iterator[None]:
    """Use models for a block, in which their hooks, state and gradients are replaced; refuse those that are in use."""
    modules = {id(module): module for model in models for module in model.modules()}
    user = object()
    try:
        with _lock:
            used = next((module for key, module in modules.items() if key in _users), None)
            if used is None:
                _users.update(dict.fromkeys(modules, user))
        if used is not None:
            raise RuntimeError(
                f"{type(used).__name__} is in use by another call of polycast.compare or polycast.tune. Wait for its "
                "end, or pass a copy of the model (copy.deepcopy)."
            )
        yield
    finally:
        with _lock:
            for key in modules:
                if _users.get(key) is user:
                    del _users[key]
