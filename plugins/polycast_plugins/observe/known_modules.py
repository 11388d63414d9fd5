"""The modules of an observation, by name: those of a model, or of all models that a program calls."""

import threading
import weakref
from collections.abc import Callable

from torch import nn

from .recorder import ModuleName, Recorder


class KnownModules:
    """Gives modules the numbers by which a recorder counts. Modules are held weakly."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.named: list[ModuleName] = []
        """By number."""
        self._numbers: dict[str, int] = {}
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._unnamed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._lock = threading.RLock()

    def add(self, model: nn.Module, name: str = "") -> None:
        """Add a model, by a name, and the modules in it."""
        for path, module in model.named_modules():
            full = f"{name}.{path}" if name and path else name or path
            if full not in self._numbers:
                self._numbers[full] = len(self.named)
                self.named.append(ModuleName(full, type(module).__name__))
            number = self._numbers[full]
            self._alive[id(module)] = weakref.ref(module, self._forget(id(module)))
            self._recorder.add_module(id(module), number)
            for parameter in module.parameters(recurse=False):
                self._recorder.add_parameter(parameter, number)

    def add_called(self, module: nn.Module, root: nn.Module) -> None:
        """Add a called module by its path in `root`, the module that the program called, named after its class."""
        if id(module) in self._alive or module in self._unnamed:
            return
        with self._lock:
            try:
                if module is root or any(module is each for each in root.modules()):
                    self.add(root, self._name_of(root))
            except Exception:  # raised by the module's own code
                pass
            if id(module) not in self._alive:
                self._unnamed.add(module)

    def _name_of(self, root: nn.Module) -> str:
        kind = type(root).__name__
        name, count = kind, 1
        while (known := self._roots[name]() if name in self._roots else None) is not None and known is not root:
            count += 1
            name = f"{kind}#{count}"
        self._roots[name] = weakref.ref(root)
        return name

    def clear(self) -> None:
        """Drop the weak references, and their callbacks."""
        self._alive.clear()

    def _forget(self, address: int) -> Callable[[object], None]:
        recorder, alive = self._recorder, self._alive

        def forget(_: object) -> None:
            alive.pop(address, None)
            recorder.forget_module(address)

        return forget
