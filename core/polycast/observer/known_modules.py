"""The modules that an observation tells apart, by name: those of a model, or of all models that a program calls."""

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from ..engine.recorder import Recorder


class Known(NamedTuple):
    """A module, as it was when it became known."""

    name: str
    kind: str


def _nothing() -> None:
    """As a reference to what has died."""


class KnownModules:
    """What a recorder knows modules by. None is held: they may come and go."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.named: list[Known] = []
        """By number."""
        self._numbers: dict[str, int] = {}
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._in_none: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._lock = threading.RLock()

    def add(self, model: nn.Module, name: str = "") -> None:
        """Know a model and the modules in it, whose names begin with its own."""
        for path, module in model.named_modules():
            full = f"{name}.{path}" if name and path else name or path
            if full not in self._numbers:
                self._numbers[full] = len(self.named)
                self.named.append(Known(full, type(module).__name__))
            number = self._numbers[full]
            self._alive[id(module)] = weakref.ref(module, self._forget(id(module)))
            self._recorder.add_module(id(module), number)
            for parameter in module.parameters(recurse=False):
                self._recorder.add_parameter(parameter, number)

    def meet(self, module: nn.Module, root: nn.Module) -> None:
        """Know a module that is called, by its place in what the program called: the `root`, named for its class."""
        if id(module) in self._alive or module in self._in_none:
            return
        with self._lock:
            try:
                if module is root or any(module is each for each in root.modules()):
                    self.add(root, self._name_of(root))
            except Exception:  # a module's own: what cannot be told of it is not told
                pass
            if id(module) not in self._alive:
                self._in_none.add(module)

    def _name_of(self, root: nn.Module) -> str:
        kind = type(root).__name__
        name, count = kind, 1
        while (known := self._roots.get(name, _nothing)()) is not None and known is not root:
            count += 1
            name = f"{kind}#{count}"
        self._roots[name] = weakref.ref(root)
        return name

    def clear(self) -> None:
        """Be told of no death any more."""
        self._alive.clear()

    def _forget(self, address: int) -> Callable[[object], None]:
        recorder, alive = self._recorder, self._alive

        def forget(_: object) -> None:
            alive.pop(address, None)
            recorder.forget_module(address)

        return forget
