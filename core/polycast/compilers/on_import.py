"""Changes to modules of torch's that may not be imported yet: made once they are, and taken back.

No module is imported for it. A finder on ``sys.meta_path`` lets the others find the module, and has it changed as soon
as it has been executed, so before those who import it have it.
"""

import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NOTHING = object()


class Changes(MetaPathFinder):
    """Changes to modules.

    Args:
        changes: for each module, by its name, what changes it; called with this object, whose :meth:`replace` it uses.
            Where the module is not as it expects, it raises, and has changed nothing.
        refused: is then called with the reason.
    """

    def __init__(self, changes: Mapping[str, Callable[["Changes"], None]], refused: Callable[[str], None]) -> None:
        self._changes = changes
        self._refused = refused
        self._begun = False
        self._waiting: dict[str, Callable[[Changes], None]] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._new_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._new_lock)

    def _new_lock(self) -> None:
        self._lock = threading.RLock()

    def make(self) -> None:
        """Change the modules that are imported now, and each of the others once it is."""
        if self._begun:
            for name in list(self._waiting):  # another thread may be importing one
                if name in sys.modules:  # by a finder that was asked before this one
                    break
            else:
                return
        with self._lock:
            if not self._begun:
                self._waiting = dict(self._changes)
                sys.meta_path.insert(0, self)
            for name in self._changes:
                if sys.modules.get(name) is not None:
                    module = importlib.import_module(name)  # waits for a thread that is importing it
                    if not getattr(module.__spec__, "_initializing", False):  # by this thread, which comes back to us
                        self.change(name)
            self._begun = True

    def change(self, name: str) -> None:
        """Change a module that has been imported, if that is still to be done."""
        change = self._waiting.pop(name, None)
        if change is not None:
            try:
                change(self)
            except Exception as error:  # whatever it is, the module is not the one that is known
                self._refused(f"{name}: {type(error).__name__}: {error}")

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or give the owner one that it has not itself, until the changes are taken back."""
        self._replaced.append((owner, name, vars(owner).get(name, _NOTHING), value))
        setattr(owner, name, value)

    def take_back(self) -> None:
        """Give the modules back what they had, but for what somebody else has replaced since."""
        with self._lock:
            self._begun = False
            self._waiting = {}
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            for owner, name, before, ours in reversed(self._replaced):
                if vars(owner).get(name) is not ours:
                    continue
                if before is _NOTHING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
            self._replaced = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Find what the other finders find."""
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenChange(spec.loader, self)
                return spec
        return None


class _ThenChange(Loader):
    """The loader of a module, until the module is executed."""

    def __init__(self, loader: Any, changes: Changes) -> None:
        self._loader = loader
        self._changes = changes

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._changes.change(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def method_of(owner: Any, name: str, *parameters: str) -> Any:
    """Return a method as its class has it, whose first parameters are to have these names."""
    method = vars(owner)[name]
    names = list(inspect.signature(method).parameters)
    expect(names[: len(parameters)] == list(parameters), f"{owner.__name__}.{name} takes {names}")
    return method


def expect(condition: bool, otherwise: str) -> None:
    """Raise what says that a module is not as a change expects it."""
    if not condition:
        raise NotImplementedError(otherwise)
