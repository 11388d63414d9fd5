"""Change modules of torch, those not imported yet at their import, and undo the changes.

A finder on ``sys.meta_path`` delegates to the other finders, and changes a module right after its execution, before its
importers see it.
"""

import functools
import importlib
import inspect
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

from ..common.atfork import call_in_forked_child
from ..errors import is_callers, warn_user

_NOTHING = object()


class _Replaced(NamedTuple):
    namespace: Mapping[Any, Any]
    key: Any
    before: Any
    ours: Any
    put: Callable[[Any, Any], object]
    remove: Callable[[Any], object]


class Patch:
    """The changes of one feature that have been made.

    Attributes:
        waiting: the functions that change modules which are not imported yet, by module.
        refused: why a change could not be made, or empty.
        has_tried_all: whether each change of an imported module has been tried.
    """

    def __init__(self, waiting: "dict[str, str | Callable[[Patch], object]]") -> None:
        self.waiting = waiting
        self.refused = ""
        self.has_tried_all = False
        self._replaced: list[_Replaced] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the owner until the feature is undone."""
        put, remove = functools.partial(setattr, owner), functools.partial(delattr, owner)
        self._replace(vars(owner), name, value, put, remove)

    def replace_item(self, owner: dict[Any, Any], key: Any, value: Any) -> None:
        """Set an item of a dict until the feature is undone."""
        self._replace(owner, key, value, owner.__setitem__, owner.__delitem__)

    def _replace(self, namespace: Mapping[Any, Any], key: Any, value: Any, put: Any, remove: Any) -> None:
        self._replaced.append(_Replaced(namespace, key, namespace.get(key, _NOTHING), value, put, remove))
        put(key, value)

    def undo(self, since: int = 0) -> None:
        """Undo the replacements but the first `since`, last first, except those that others have replaced since."""
        while len(self._replaced) > since:
            each = self._replaced.pop()
            if each.namespace.get(each.key, _NOTHING) is not each.ours:
                continue
            if each.before is _NOTHING:
                each.remove(each.key)
            else:
                each.put(each.key, each.before)


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
    changes: Sequence[tuple[str, tuple[str, ...], str | Callable[[Patch], object]]]
    on_refusal: str | Callable[[str], object] = ""
    on_undo: str | Callable[[], object] = ""
    outlives_uninstall: bool = False

    def make(self) -> bool:
        """Make the changes: in imported modules at once, in others at their import.

        Returns:
            Whether no change has been refused so far.

        Raises:
            Exception: a change failed, and `lost` is empty; nothing was changed.
        """
        patch = _patches.get(self)
        if patch is not None and patch.has_tried_all:
            for name in list(patch.waiting):  # a copy: another thread may be importing one
                if name in sys.modules:  # found by a finder before ours
                    break
            else:
                return not patch.refused
        with _lock:
            patch = _patches.get(self)
            if patch is None:
                patch = _patches[self] = Patch({module: function for module, _, function in self.changes})
                if _finder not in sys.meta_path:
                    sys.meta_path.insert(0, _finder)
            try:
                for name in list(patch.waiting):
                    if sys.modules.get(name) is not None:
                        module = importlib.import_module(name)  # waits for a thread that is importing it
                        if not getattr(module.__spec__, "_initializing", False):  # this thread: exec_module changes it
                            self._change(patch, name)
            except BaseException:
                self.undo()
                raise
            patch.has_tried_all = True
            return not patch.refused

    def _change(self, patch: Patch, name: str) -> None:
        """Make the change of a module that has been imported, if it is waiting."""
        function = patch.waiting.pop(name, None)
        if function is None:
            return
        since = len(patch._replaced)
        try:
            _function(function)(patch)
            if _patches.get(self) is not patch:  # another thread has undone the feature
                patch.undo()
        except BaseException as error:  # an Exception of any kind: the module is not the expected one
            patch.undo(since)
            if not isinstance(error, Exception) or not self.lost or is_callers(error):
                patch.waiting[name] = function
                raise
            patch.refused = f"{name}: {type(error).__name__}: {error}"
            if self.on_refusal:
                _function(self.on_refusal)(patch.refused)
            else:
                reason = f"{torch.__version__}; {patch.refused}"
                warn_user(f"polycast does not support the internals of this torch ({reason}): {self.lost}")

    def undo(self) -> None:
        """Undo the changes, if they have been made."""
        with _lock:
            patch = _patches.pop(self, None)
            if not _patches and _finder in sys.meta_path:
                sys.meta_path.remove(_finder)
            if patch is not None:
                patch.waiting = {}
                patch.undo()
                if self.on_undo:
                    _function(self.on_undo)()

    def is_made(self) -> bool:
        """Return whether the changes have been made and not undone."""
        return self in _patches

    def is_refused(self) -> bool:
        """Return whether a change has been refused."""
        patch = _patches.get(self)
        return patch is not None and bool(patch.refused)

    @staticmethod
    def made() -> "dict[Feature, str]":
        """Return the features that are made now, each with the reason why a change was refused, or an empty text."""
        return {feature: patch.refused for feature, patch in list(_patches.items())}


_patches: dict[Feature, Patch] = {}
"""The features that are made, in order."""
_lock = threading.RLock()


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


call_in_forked_child(_new_lock)


def undo_all() -> None:
    """Undo the changes of all features except those that outlive ``uninstall()``, last first."""
    for feature in reversed(list(_patches)):
        if not feature.outlives_uninstall:
            feature.undo()


def _function(reference: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(reference, str):
        return reference
    found: Callable[..., Any] = pkgutil.resolve_name(reference)
    return found


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find, with a loader that changes the module."""
        if not any(fullname in patch.waiting for patch in list(_patches.values())):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ChangingLoader(spec.loader)
                return spec
        return None


_finder = _Finder()


class _ChangingLoader(Loader):
    """Wraps the loader of a module until the module has been executed."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for feature, patch in list(_patches.items()):
            feature._change(patch, module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


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
