"""A first run of a model, in float32: which modules it calls, and what it writes."""

from dataclasses import dataclass, field
from typing import Any

import torch

from .calls import Call
from .hooks import here, watched
from .untouched import ModelState, RandomState, isolated, written_state
from .values import State


@dataclass
class Called:
    """What is known of a module that is called.

    Attributes:
        name: its first name in the model; that of the model itself is empty.
        order: how many calls began before its first one.
        calls: how often it is called.
        is_leaf: whether none of its calls calls another module.
        writes_arguments: whether it writes to its arguments.
        has_parameters: whether it, or a module in it, has some.
        callers: the names of the modules that call it; None stands for whoever calls the model.
    """

    name: str
    order: int
    calls: int = 0
    is_leaf: bool = True
    writes_arguments: bool = False
    has_parameters: bool = False
    callers: set[str | None] = field(default_factory=set)


@dataclass
class Survey:
    """What a first run has shown.

    Attributes:
        modules: the modules that are called, in the order of their first calls.
        calls: how many calls there are.
        state: what it writes of itself.
    """

    modules: dict[torch.nn.Module, Called] = field(default_factory=dict)
    calls: int = 0
    state: ModelState = field(default_factory=lambda: ModelState([]))

    def by_name(self) -> dict[str, Called]:
        """Return the modules that are called by their names, in the order of their first calls."""
        return {called.name: called for called in self.modules.values()}


class _Surveyor:
    def __init__(self, model: torch.nn.Module) -> None:
        self.survey = Survey()
        self._names = {module: name for name, module in model.named_modules()}
        self._open: list[tuple[torch.nn.Module, Any, State]] = []

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        survey = self.survey
        called = survey.modules.get(module)
        if called is None:
            called = survey.modules[module] = Called(self._names[module], survey.calls)
            called.has_parameters = next(module.parameters(), None) is not None
        called.calls += 1
        survey.calls += 1
        if self._open:
            caller = survey.modules[self._open[-1][0]]
            caller.is_leaf = False
            called.callers.add(caller.name)
        else:
            called.callers.add(None)
        arguments = (args, kwargs)
        self._open.append((module, arguments, State.of(arguments)))

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        while True:
            last, arguments, state = self._open.pop()
            if last is module:
                break
        if not state.is_still_that_of(arguments):
            self.survey.modules[module].writes_arguments = True


def survey(model: torch.nn.Module, call: Call, device_type: str) -> tuple[Survey, Any]:
    """Run a model once in float32, outside all regions, and leave it as it was; return its output, too.

    Raises:
        TypeError: the model is a ScriptModule.
        RuntimeError: its forward writes to its parameters.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "the model is a ScriptModule: what it calls is not Python's to see. Use the model that it was made of, or "
            "put it into a module."
        )
    surveyor = _Surveyor(model)

    def run() -> Any:
        with watched(model, here(surveyor)):
            return call.of_model(model)

    with isolated(), RandomState(device_type).kept():
        output, state = written_state(model, run)
    surveyor.survey.state = state
    return surveyor.survey, output
