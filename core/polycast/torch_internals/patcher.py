"""Change modules of torch, those not imported yet at their import, and undo the changes.

A finder on ``sys.meta_path`` delegates to the other finders, and changes a module right after its execution, before its
importers see it.
"""

import importlib
import inspect
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..errors import is_callers, warn_user

_NOTHING = object()


class Change(NamedTuple):
    """A change to a module of torch; see :class:`Feature`."""

    module: str
    names: tuple[str, ...]
    function: "str | Callable[[Patch], object]"


@dataclass(frozen=True, eq=False)
class Feature:
    """A feature that needs changes to torch, made when it is first needed, and undone by ``polycast.uninstall()``.

    Attributes:
        name: the name in a bug report.
        lost: what users lose if torch cannot be changed, for the warning; if empty, the error is raised instead.
        changes: the changes, in order, each a tuple of a module, names and a function. The module is changed at its
            import, and not imported for it. The names say what is replaced: attributes of the module and of its
            classes, as dotted names; ``*`` matches any. The function, or its name, ``module:function``, imported when
            needed, is called with a :class:`Patch`, checks that the module is the expected one, raises otherwise, and
            replaces the names.
        on_refusal: a function, or its name, ``module:function``, called with the reason instead of warning.
        on_undo: the same, called without arguments when the feature has been undone.
        outlives_uninstall: whether the feature lasts as long as a block or an object of the user, so that
            ``uninstall()`` leaves it alone.
    """

    name: str
    lost: str
    changes: "Sequence[tuple[str, tuple[str, ...], str | Callable[[Patch], object]]]"
    on_refusal: "str | Callable[[str], object]" = ""
    on_undo: "str | Callable[[], object]" = ""
    outlives_uninstall: bool = False

    def make(self) -> bool:
        """Make the changes: in imported modules at once, in others at their import.

        Returns:
            Whether no change has been refused so far.

        Raises:
            Exception: a change failed, and `lost` is empty; nothing was changed.
        """
        return _patcher.make(self)

    def undo(self) -> None:
        """Undo the changes, if they have been made."""
        _patcher.undo(self)

    def is_made(self) -> bool:
        """Return whether the changes have been made and not undone."""
        return _patcher.is_made(self)

    def is_refused(self) -> bool:
        """Return whether a change has been refused."""
        return _patcher.is_refused(self)

    @staticmethod
    def made() -> "dict[Feature, str]":
        """Return the features that are made now, each with the reason why a change was refused, or an empty text."""
        return _patcher.made()


class _Replaced(NamedTuple):
    owner: Any
    name: Any
    before: Any
    ours: Any
    is_item: bool


class Patch:
    """The changes of one feature that have been made.

    Attributes:
        waiting: the changes of modules that are not imported yet, by module.
        refused: why a change could not be made, or empty.
        has_tried_all: whether each change of an imported module has been tried.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, Change] = {}
        self.refused = ""
        self.has_tried_all = False
        self._replaced: list[_Replaced] = []

    @property
    def count(self) -> int:
        """The number of replacements, for :meth:`undo`."""
        return len(self._replaced)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the owner until the feature is undone."""
        self._replaced.append(_Replaced(owner, name, vars(owner).get(name, _NOTHING), value, is_item=False))
        setattr(owner, name, value)

    def replace_item(self, owner: dict[Any, Any], key: Any, value: Any) -> None:
        """Set an item of a dict until the feature is undone."""
        self._replaced.append(_Replaced(owner, key, owner.get(key, _NOTHING), value, is_item=True))
        owner[key] = value

    def undo(self, since: int = 0) -> None:
        """Undo the replacements but the first `since`, last first, except those that others have replaced since."""
        while len(self._replaced) > since:
            owner, name, before, ours, is_item = self._replaced.pop()
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
    """Makes and undoes features."""

    def __init__(self) -> None:
        self._patches: dict[Feature, Patch] = {}
        self._new_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._new_lock)

    def _new_lock(self) -> None:
        self._lock = threading.RLock()

    def make(self, feature: Feature) -> bool:
        """See :meth:`Feature.make`."""
        patch = self._patches.get(feature)
        if patch is not None and patch.has_tried_all:
            for name in list(patch.waiting):  # a copy: another thread may be importing one
                if name in sys.modules:  # found by a finder before this one
                    break
            else:
                return not patch.refused
        with self._lock:
            patch = self._patches.get(feature)
            if patch is None:
                patch = Patch()
                patch.waiting = {change.module: change for change in map(Change._make, feature.changes)}
                self._patches[feature] = patch
                if self not in sys.meta_path:
                    sys.meta_path.insert(0, self)
            try:
                for name in list(patch.waiting):
                    if sys.modules.get(name) is not None:
                        module = importlib.import_module(name)  # waits for a thread that is importing it
                        if not getattr(module.__spec__, "_initializing", False):  # this thread: exec_module changes it
                            self._change(feature, patch, name)
            except BaseException:
                self.undo(feature)
                raise
            patch.has_tried_all = True
            return not patch.refused

    def is_made(self, feature: Feature) -> bool:
        """See :meth:`Feature.is_made`."""
        return feature in self._patches

    def is_refused(self, feature: Feature) -> bool:
        """See :meth:`Feature.is_refused`."""
        patch = self._patches.get(feature)
        return patch is not None and bool(patch.refused)

    def made(self) -> dict[Feature, str]:
        """See :meth:`Feature.made`."""
        return {feature: patch.refused for feature, patch in list(self._patches.items())}

    def change(self, name: str) -> None:
        """Make the waiting changes of a module that has been imported."""
        for feature, patch in list(self._patches.items()):
            self._change(feature, patch, name)

    def _change(self, feature: Feature, patch: Patch, name: str) -> None:
        change = patch.waiting.pop(name, None)
        if change is None:
            return
        since = patch.count
        try:
            _function(change.function)(patch)
            if self._patches.get(feature) is not patch:  # another thread has undone the feature
                patch.undo()
        except BaseException as error:  # an Exception of any kind: the module is not the expected one
            patch.undo(since)
            if not isinstance(error, Exception) or not feature.lost or is_callers(error):
                patch.waiting[name] = change
                raise
            patch.refused = f"{name}: {type(error).__name__}: {error}"
            if feature.on_refusal:
                _function(feature.on_refusal)(patch.refused)
            else:
                _warn(feature.lost, patch.refused)

    def undo(self, feature: Feature) -> None:
        """Undo the changes of a feature, if it has been made."""
        with self._lock:
            patch = self._patches.pop(feature, None)
            if not self._patches and self in sys.meta_path:
                sys.meta_path.remove(self)
            if patch is not None:
                patch.waiting = {}
                patch.undo()
                if feature.on_undo:
                    _function(feature.on_undo)()

    def undo_all(self) -> None:
        """Undo the changes of all features except those that outlive ``uninstall()``, last first."""
        for feature in reversed(list(self._patches)):
            if not feature.outlives_uninstall:
                self.undo(feature)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find, with a loader that changes the module."""
        if not any(fullname in patch.waiting for patch in list(self._patches.values())):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ChangingLoader(spec.loader, self)
                return spec
        return None


class _ChangingLoader(Loader):
    """Wraps the loader of a module until the module has been executed."""

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


_patcher = Patcher()
undo_all = _patcher.undo_all


def _function(reference: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(reference, str):
        return reference
    found: Callable[..., Any] = pkgutil.resolve_name(reference)
    return found


def _warn(lost: str, reason: str) -> None:
    warn_user(f"polycast does not support the internals of this torch ({torch.__version__}; {reason}): {lost}")


def method_of(owner: Any, name: str, *parameters: str) -> Any:
    """Return a method from its class, after checking the names of its first parameters."""
    method = vars(owner)[name]
    names = list(inspect.signature(method).parameters)
    expect(names[: len(parameters)] == list(parameters), f"{owner.__name__}.{name} takes {names}")
    return method


def expect(condition: bool, otherwise: str) -> None:
    """Raise NotImplementedError if a module is not as a change expects it."""
    if not condition:
        raise NotImplementedError(otherwise)
