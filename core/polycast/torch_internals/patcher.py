"""Changes to modules of torch's that may not be imported yet: made once they are, and undone.

No module is imported for it. A finder on ``sys.meta_path`` lets the others find the module, and has it changed as soon
as it has been executed, so before those who import it have it.
"""

import importlib
import inspect
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..errors import warn_user

_NOTHING = object()
_PACKAGE = __name__.partition(".")[0]


class Change(NamedTuple):
    """A change to a module of torch's."""

    module: str
    """It is changed as soon as it is imported, and imported by those who use it."""
    names: tuple[str, ...]
    """What is replaced: attributes of the module or, by dotted names, of its classes; ``*`` stands for several."""
    by: "str | Callable[[Patch], object]"
    """``room.module:function`` of polycast's, imported when it is needed. It is called with a :class:`Patch`, looks
    whether the module is the one that it knows, raises if it is not, and replaces the names."""


@dataclass(frozen=True)
class Feature:
    """Something of polycast's that needs torch changed.

    Attributes:
        lost: what users lose in a torch that cannot be changed so, as the warning says it; empty: they get the error.
        changes: the changes, in the order in which they are made.
        otherwise: ``room.module:function`` that is called with the reason in place of the warning.
        by_user: whether the user begins and ends it, or holds what needs it, so that ``uninstall()`` leaves it.
    """

    lost: str
    changes: tuple[Change, ...]
    otherwise: "str | Callable[[str], object]" = ""
    by_user: bool = False


class _Replaced(NamedTuple):
    owner: Any
    name: Any
    before: Any
    ours: Any
    is_item: bool


class Patch:
    """What is changed for a feature now."""

    def __init__(self) -> None:
        self.waiting: dict[str, Change] = {}
        """By the name of the module."""
        self.replaced: list[_Replaced] = []
        self.refused = ""
        """Why a change was not made; empty: all that could be were."""
        self.is_made = False

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or give the owner one that it has not itself, until the feature is undone."""
        self.replaced.append(_Replaced(owner, name, vars(owner).get(name, _NOTHING), value, is_item=False))
        setattr(owner, name, value)

    def replace_item(self, owner: dict[Any, Any], key: Any, value: Any) -> None:
        """Replace an item of a dict, or add it, until the feature is undone."""
        self.replaced.append(_Replaced(owner, key, owner.get(key, _NOTHING), value, is_item=True))
        owner[key] = value

    def undo(self, since: int = 0) -> None:
        """Undo what was replaced, the last first, but for what somebody else has replaced again."""
        while len(self.replaced) > since:
            owner, name, before, ours, is_item = self.replaced.pop()
            now = owner if is_item else vars(owner)
            if now.get(name, _NOTHING) is not ours:
                continue
            if is_item and before is _NOTHING:
                del owner[name]
            elif is_item:
                owner[name] = before
            elif before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class Patcher(MetaPathFinder):
    """The changes of a table, made by the features that need them."""

    def __init__(self, features: Mapping[str, Feature]) -> None:
        self._features = features
        self._patches: dict[str, Patch] = {}
        """By the name of the feature, what is made of it."""
        self._new_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._new_lock)

    def _new_lock(self) -> None:
        self._lock = threading.RLock()

    def make(self, feature: str) -> bool:
        """Make the changes of a feature: in the modules that are imported now, and in each of the others once it is.

        Returns:
            Whether none of them was refused until now.

        Raises:
            Exception: a feature without a text of what is lost could not be made; nothing was changed.
        """
        patch = self._patches.get(feature)
        if patch is not None and patch.is_made:
            for name in list(patch.waiting):  # another thread may be importing one
                if name in sys.modules:  # by a finder that was asked before this one
                    break
            else:
                return not patch.refused
        with self._lock:
            patch = self._patches.get(feature)
            if patch is None:
                patch = Patch()
                patch.waiting = {change.module: change for change in self._features[feature].changes}
                self._patches[feature] = patch
                if self not in sys.meta_path:
                    sys.meta_path.insert(0, self)
            try:
                for name in list(patch.waiting):
                    if sys.modules.get(name) is not None:
                        module = importlib.import_module(name)  # waits for a thread that is importing it
                        if not getattr(module.__spec__, "_initializing", False):  # by this one, which comes back to us
                            self._change(feature, patch, name)
            except BaseException:
                self.undo(feature)
                raise
            patch.is_made = True
            return not patch.refused

    def is_made(self, feature: str) -> bool:
        """Return whether a feature is made, and not undone."""
        return feature in self._patches

    def is_refused(self, feature: str) -> bool:
        """Return whether a change of a feature was refused."""
        patch = self._patches.get(feature)
        return patch is not None and bool(patch.refused)

    def change(self, name: str) -> None:
        """Change a module that has been imported, where that is still to be done."""
        for feature, patch in list(self._patches.items()):
            self._change(feature, patch, name)

    def _change(self, feature: str, patch: Patch, name: str) -> None:
        change = patch.waiting.pop(name, None)
        if change is None:
            return
        since = len(patch.replaced)
        what = self._features[feature]
        try:
            _function(change.by)(patch)
            if self._patches.get(feature) is not patch:  # another thread has undone the feature meanwhile
                patch.undo()
        except Exception as error:  # whatever it is, the module is not the one that is known
            patch.undo(since)
            if not what.lost:
                raise
            patch.refused = f"{name}: {type(error).__name__}: {error}"
            if what.otherwise:
                _function(what.otherwise)(patch.refused)
            else:
                _warn(what.lost, patch.refused)

    def undo(self, feature: str) -> None:
        """Undo the changes of a feature, if it is made."""
        with self._lock:
            patch = self._patches.pop(feature, None)
            if not self._patches and self in sys.meta_path:
                sys.meta_path.remove(self)
            if patch is not None:
                patch.waiting = {}
                patch.undo()

    def undo_all(self) -> None:
        """Undo the changes of all features but those that the user begins and ends."""
        for feature, what in self._features.items():
            if not what.by_user:
                self.undo(feature)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Find what the other finders find."""
        if not any(fullname in patch.waiting for patch in list(self._patches.values())):
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

    def __init__(self, loader: Any, patcher: Patcher) -> None:
        self._loader = loader
        self._patcher = patcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._patcher.change(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _function(reference: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(reference, str):
        return reference
    found: Callable[..., Any] = pkgutil.resolve_name(f"{_PACKAGE}.{reference}")
    return found


def _warn(lost: str, reason: str) -> None:
    warn_user(f"polycast does not know the internals of this torch ({torch.__version__}; {reason}): {lost}")


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
