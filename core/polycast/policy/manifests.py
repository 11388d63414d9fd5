"""Manifests of plugins: what each adds to polycast, known before its code is imported.

A manifest is a `Plugin` that an entry point in the group `GROUP` names. Reading it imports its module, which should
import nothing else of the plugin. A plugin that is broken, or slow to import, affects only what it adds.
"""

import importlib.metadata
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from typing_extensions import Self

from ..common import env
from ..common.announce import announce_if_slow
from ..common.importing import importing
from ..common.lazy_names import places
from ..common.versions import API_VERSION, api_problem, misspelled, name_and_version
from ..errors import PLUGIN_ERRORS, missing_library, raise_if_callers, raise_if_callers_at_import, warn_user
from ..torch_internals.callers_state import call_outside
from ..torch_internals.dispatcher import disable_autocast
from ..torch_internals.foreign_import import foreign_import

GROUP = "polycast.plugins"
PROJECT = "polycast"
_OF_PLUGINS = {
    **dict.fromkeys(("WeightCache.load", "WeightCache.save", "float8", "int4", "int8"), "quantize"),
    "fastest": "fastest",
}
"""The plugin of each method and recipe, for errors where polycast's own plugins are absent; the stub has the names."""


@dataclass(frozen=True)
class Plugin:
    """Lists what a plugin adds. Objects are named ``module:attribute``, and imported when they are first used.

    Attributes:
        names: what it adds to the module ``polycast``, by name.
        methods: the functions that implement methods of classes of the core, by ``Class.method``:
            ``WeightCache.save`` and ``WeightCache.load``.
        recipes: the classes of recipes, by kind.
        commands: commands of ``polycast``, by name: functions with parameters for typer, or typer apps. What such a
            function returns, if it can be called, is called when the command line has ended.
        doctor: sections of ``polycast doctor``, by title: functions without parameters that yield lines.
        devices: remarks of ``polycast devices``, by their key in its JSON: functions that take the device type of a
            backend that is ready, and return a sentence, or None.
        vetoes: functions that say why a kernel of a recipe should not compute a call: given the device type, the
            recipe's kind, the op and its arguments, which may be fake, each returns a str, or None.
        slow_reasons: functions that know better than backends whether a fast dtype is slow on a device: given the
            device type, the dtype, and the reason so far, the backend's at first, each returns the reason, as the end
            of a sentence, or None: the dtype is not slow.
        libraries: its C++, which ``polycast build`` compiles: each a :class:`NativeLibrary` or what `of_ops` returns.
        needs: the plugins that it imports, by the names of their entry points; the modules of commands, which only
            the command line imports, may import ``polycast_plugins.cli`` anyway.
        api: the version of ``polycast.plugin`` that it is written for, such as 1; by default the running one,
            :data:`polycast.plugin.API_VERSION`.

    Raises:
        TypeError: an attribute is unknown or of another type, or the version is not supported.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    doctor: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    vetoes: Sequence[str] = ()
    slow_reasons: Sequence[str] = ()
    libraries: Sequence[str] = ()
    needs: Sequence[str] = ()
    api: int = field(default=API_VERSION, kw_only=True)

    def __new__(cls, *_: object, **given: object) -> Self:
        """Return an object to initialize; refuse names that a newer version, or nobody, knows."""
        problem = api_problem(given.get("api", API_VERSION)) or "; ".join(misspelled(given, cls.__dataclass_fields__))
        if problem:
            raise TypeError(problem)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for attribute in ("names", "methods", "recipes", "commands", "doctor", "devices"):
            table = getattr(self, attribute)
            if not isinstance(table, Mapping) or not _are_texts([*table, *table.values()]):
                raise TypeError(f"{attribute} must map names to 'module:attribute', got {table!r}")
        functions = "'module:function'"
        kinds = {"vetoes": functions, "slow_reasons": functions, "libraries": "'module:attribute'"}
        for attribute, each in {**kinds, "needs": "names of plugins"}.items():
            values = getattr(self, attribute)
            if isinstance(values, str) or not isinstance(values, Sequence) or not _are_texts(values):
                raise TypeError(f"{attribute} must be a sequence of {each}, got {values!r}")


def _are_texts(values: Sequence[object]) -> bool:
    return all(isinstance(each, str) for each in values)


class InstalledPlugin(NamedTuple):
    """A plugin that is installed: an item of what :func:`manifests` returns."""

    name: str
    distribution: str
    version: str
    plugin: Plugin
    problem: str = ""

    @property
    def is_own(self) -> bool:
        """Whether it comes with polycast."""
        return env.canonical_name(self.distribution) == PROJECT

    def resolve(self, path: str) -> Any:
        """Return an object of the plugin, given as ``module:attribute``.

        Raises:
            RuntimeError: it cannot be imported.
        """
        try:
            with importing(), _announced(self.name, self.distribution, self.is_own), disable_autocast():
                return call_outside(_imported, self.distribution, partial(pkgutil.resolve_name, path))
        except PLUGIN_ERRORS as error:
            raise_if_callers_at_import(error)
            if isinstance(error, ImportError) and (lack := missing_library(error, self.distribution)):
                raise RuntimeError(f"{path} cannot be imported. {lack}") from error
            installed = {each.name for each in manifests()}
            missing = [name for name in self.plugin.needs if name not in installed]
            needs = f" It needs {', '.join(map(repr, missing))}, which is not installed." if missing else ""
            problem = _broken(self.name, self.distribution, error)
            raise RuntimeError(f"{path} cannot be imported. {problem}{needs}") from error


class Manifests(tuple[InstalledPlugin, ...]):
    """The installed plugins."""

    def find(self, table: str, name: str) -> Any:
        """Return the object with a name in a table of a manifest, such as ``recipes``; None if there is none.

        polycast's own plugins take precedence over others.

        Raises:
            RuntimeError: several plugins have one, or it cannot be imported.
        """
        offers = [each for each in self if name in getattr(each.plugin, table)]
        offers = [each for each in offers if each.is_own] or offers
        if len(offers) > 1:
            plugins = ", ".join(f"{each.name} ({each.distribution})" for each in offers)
            raise RuntimeError(f"Several plugins have {name!r} in {table}: {plugins}. Uninstall all but one.")
        return next((each.resolve(getattr(each.plugin, table)[name]) for each in offers), None)


class PluginFunction(NamedTuple):
    """A function of a plugin, and its ``module:function``."""

    path: str
    function: Callable[..., Any]

    def ask(self, *args: Any, default: Any = None) -> Any:
        """Return what the function returns; if it raises, warn of that and return the default."""
        try:
            return self.function(*args)
        except PLUGIN_ERRORS as error:
            raise_if_callers(error)
            warn_user(f"{self.path}, of a plugin, failed: {type(error).__name__}: {error}")
            return default


class _Thread(threading.local):
    is_reading = False
    """Whether this thread reads the manifests."""


_thread = _Thread()
_manifests: Manifests | None = None
_functions: dict[str, Sequence[PluginFunction]] = {}


def manifests() -> Manifests:
    """Return the installed plugins with their manifests, and warn of broken ones; none while they are read.

    Returns:
        A tuple. Each item has the `name` of an entry point, its `distribution` and the `version` of that, the manifest
        `plugin`, empty if it is broken, and `problem`: why it is broken, and what to do. Its method ``resolve(path)``
        imports an object, given as ``module:attribute``. The tuple's ``find(table, name)`` returns the object with a
        name in a table of a manifest, such as ``recipes``, or None. Both raise RuntimeError if an object cannot be
        imported, and ``find`` also if several plugins have one.
    """
    global _manifests
    known = _manifests
    if known is None:
        if _thread.is_reading:  # the module of a manifest asks
            return Manifests()
        unfinished: list[str] = []
        _thread.is_reading = True
        try:
            known = Manifests(_read(unfinished))
        finally:
            _thread.is_reading = False
        if _manifests is None and not unfinished:  # else another thread has read them, too, or will
            _manifests = known
            for each in known:
                if each.problem:
                    warn_user(each.problem)
    return known


def forget() -> None:
    """Read the manifests again at the next use."""
    global _manifests
    _manifests = None
    _functions.clear()


def _read(unfinished: list[str]) -> Iterator[InstalledPlugin]:
    """Yield the installed plugins, except `unfinished` ones, whose manifest is in a module that is being imported."""
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        distribution, version = name_and_version(point)
        is_own = env.canonical_name(distribution) == PROJECT
        if not is_own and not env.discovery():
            continue
        try:
            with importing(), _announced(point.name, distribution, is_own), disable_autocast():
                plugin = call_outside(_imported, distribution, point.load)
            if not isinstance(plugin, Plugin):
                raise TypeError(f"{point.value} must be a polycast.plugin.Plugin, got {plugin!r}")
        except PLUGIN_ERRORS as error:
            raise_if_callers_at_import(error)
            if _is_being_imported(point.value.partition(":")[0]):
                unfinished.append(point.name)
                continue
            yield InstalledPlugin(point.name, distribution, version, Plugin(), _broken(point.name, distribution, error))
        else:
            yield InstalledPlugin(point.name, distribution, version, plugin)


def _imported(distribution: str, function: Callable[[], Any]) -> Any:
    """Return what a function returns that imports code of a distribution."""
    with nullcontext() if env.canonical_name(distribution) == PROJECT else foreign_import(distribution):
        return function()


def _is_being_imported(module: str) -> bool:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _announced(name: str, distribution: str, is_own: bool) -> AbstractContextManager[None]:
    waiting = f"still importing the plugin {name!r} of {distribution}. POLYCAST_DISCOVERY=0 leaves it out."
    return nullcontext() if is_own else announce_if_slow(waiting)


def _broken(name: str, distribution: str, error: BaseException) -> str:
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    return f"The plugin {name!r} of {distribution} is broken: {reason}. Repair or uninstall {distribution}."


def functions(table: str) -> Sequence[PluginFunction]:
    """Return the functions that the manifests name in a list, such as ``vetoes``; warn of what cannot be imported."""
    if table in _functions:
        return _functions[table]
    found, problems = [], []
    for manifest in manifests():
        for path in getattr(manifest.plugin, table):
            try:
                found.append(PluginFunction(path, manifest.resolve(path)))
            except RuntimeError as error:
                problems.append(str(error))
    if _manifests is not None:  # else there may be more: the module of a manifest asks
        _functions[table] = found
    for problem in problems:  # once the others are kept: a filter may turn this warning into an error
        warn_user(problem)
    return found


def method(name: str) -> Callable[..., Any]:
    """Return the function that implements a method of a class of the core, ``Class.method``, in a plugin.

    Raises:
        NotImplementedError: no installed plugin has it.
        RuntimeError: several plugins have it, or it cannot be imported.
    """
    found: Callable[..., Any] | None = manifests().find("methods", name)
    if found is None:
        raise NotImplementedError(f"polycast has no {name}{remedy(name)}")
    return found


def public_name(name: str) -> Any:
    """Return the object that a plugin adds to ``polycast`` under a name.

    Raises:
        AttributeError: no installed plugin has it.
        RuntimeError: several plugins have it, or it cannot be imported.
    """
    found = manifests().find("names", name)
    if found is None:
        place = places(PROJECT).get(name, ".")  # such as polycast_plugins.observe.observer
        raise AttributeError(f"module 'polycast' has no attribute {name!r}{_remedy(place.split('.')[1])}")
    return found


def remedy(name: str) -> str:
    """Return the end of a sentence that says whose a method or recipe is, if one of an absent plugin of ours, or ""."""
    return _remedy(_OF_PLUGINS.get(name))


def _remedy(plugin: str | None) -> str:
    return f": it is of the plugin {plugin!r}, which is not installed. Install polycast again" if plugin else ""
