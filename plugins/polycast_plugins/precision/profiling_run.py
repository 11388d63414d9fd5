"""Profile a model in one float32 run: the modules it calls, and the state and arguments that it writes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from polycast_plugins.observe import RandomState

from .calls import Calls, ModelCall, in_this_thread, run_eagerly, tensors_of, watched_modules
from .isolation import ModelState, find_writes, isolated
from .values import Contents

_T = TypeVar("_T")


@dataclass
class ModuleProfile:
    """A module that the model calls.

    Attributes:
        name: its first name in the model; empty for the model itself.
        order: the number of calls before its first call.
        has_parameters: whether it, or a module in it, has parameters.
        written: the paths of the tensors among its arguments that it writes to.
        dtypes: those of the tensors among its arguments.
        callers: the names of the modules that call it; None for the caller of the model.
    """

    name: str
    order: int
    has_parameters: bool
    calls: int = 0
    writes_arguments: bool = False
    written: set[str] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    callers: set[str | None] = field(default_factory=set)


@dataclass
class ModelProfile:
    """The modules that are called, in the order of their first calls, and the state that the forward writes."""

    modules: dict[torch.nn.Module, ModuleProfile] = field(default_factory=dict)
    calls: int = 0
    state: ModelState = field(default_factory=lambda: ModelState([]))

    def add(self, other: "ModelProfile") -> None:
        """Add the profile of another call of the model."""
        for module, theirs in other.modules.items():
            ours = self.modules.get(module)
            if ours is None:
                theirs.order += self.calls
                self.modules[module] = theirs
            else:
                ours.calls += theirs.calls
                ours.writes_arguments |= theirs.writes_arguments
                ours.written |= theirs.written
                ours.dtypes |= theirs.dtypes
                ours.callers |= theirs.callers
        self.calls += other.calls
        self.state = self.state.with_slots_of(other.state)

    def by_name(self) -> dict[str, ModuleProfile]:
        """Return the modules by name, in the order of their first calls."""
        return {module.name: module for module in self.modules.values()}


class _Profiler:
    def __init__(self, names: Mapping[torch.nn.Module, str]) -> None:
        self.profile = ModelProfile()
        self._names = names
        self._open: list[tuple[torch.nn.Module, Any, Contents]] = []

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        profile = self.profile
        called = profile.modules.get(module)
        if called is None:
            has_parameters = next(module.parameters(), None) is not None
            called = ModuleProfile(self._names[module], profile.calls, has_parameters)
            profile.modules[module] = called
        called.calls += 1
        profile.calls += 1
        called.callers.add(profile.modules[self._open[-1][0]].name if self._open else None)
        arguments = (args, kwargs)
        contents = Contents(arguments)
        called.dtypes |= contents.dtypes()
        self._open.append((module, arguments, contents))

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        while True:
            last, arguments, contents = self._open.pop()
            if last is module:
                break
        if contents.differ_from(arguments):
            self.profile.modules[module].writes_arguments = True
            self.profile.modules[module].written |= contents.written()


def profile_runs(
    model: torch.nn.Module, calls: Calls, device_type: str, gradients: bool = False
) -> tuple[ModelProfile, list[Any]]:
    """Run each call of a model once in float32, outside all regions and without side effects.

    Return one profile of all calls, and the outputs. `gradients` says whether autograd records.
    """
    check_not_scripted(model)

    def run(call: ModelCall) -> Any:
        with torch.set_grad_enabled(gradients):
            return call.run(model)

    names = {module: name for name, module in model.named_modules()}
    profile, outputs, random = ModelProfile(), [], RandomState(device_type, tensors_of(model, calls))
    for call in calls:
        with run_eagerly():
            found, output = profiled(model, partial(run, call), names, random)
        profile.add(found)
        outputs.append(output)
    return profile, outputs


def check_not_scripted(model: torch.nn.Module) -> None:
    """Raise TypeError for a ScriptModule."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "the model is a ScriptModule, whose calls of modules are not visible to Python. Use the model that it was "
            "scripted from, or wrap it in a module."
        )


def profiled(
    model: torch.nn.Module, run: Callable[[], _T], names: Mapping[torch.nn.Module, str], random: RandomState
) -> tuple[ModelProfile, _T]:
    """Call a function that runs a model, outside all regions and without side effects.

    Return the profile of the modules in `names`, and the result of the function.
    """
    profiler = _Profiler(names)

    def watched_run() -> _T:
        with watched_modules(names, in_this_thread(profiler)):
            return run()

    with isolated(random):
        result, profiler.profile.state = find_writes(model, watched_run)
    return profiler.profile, result
