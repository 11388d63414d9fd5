"""Load the native engine and its observer."""

import functools
from pathlib import Path
from types import ModuleType

from ...toolchain.build_cache import cache_directory
from ...toolchain.cpp_library import BuildError, CppLibrary
from ...toolchain.load import import_extension, load_built, load_prebuilt, try_build
from .engine import NativeEngine

_RETRY = "`polycast build` tries again"
ENGINE = CppLibrary(str(__package__), "polycast_native", "the native engine", _RETRY, (".", "common"))
OBSERVER = CppLibrary(
    str(__package__), "polycast_observer", "the native engine's observer", _RETRY, ("observer", "common")
)
"""Counts ops for `observe`. A separate library, so that programs which observe nothing need not build it."""


def load() -> NativeEngine:
    """Return the native engine: the one that came with polycast, or a build, making it if none is there for this torch.

    Raises:
        BuildError: it cannot be built, or does not load.

    Warns:
        UserWarning: the cache cannot be trusted, so that it was built for this process alone.
    """
    return _load_prebuilt() or _load(cache_directory())


@functools.cache
def _load_prebuilt() -> NativeEngine | None:
    found = load_prebuilt(ENGINE, import_extension)
    return None if found is None else NativeEngine(*found, ObserverLibrary())


@functools.cache
def _load(cache: Path) -> NativeEngine:
    return NativeEngine(*load_built(cache, ENGINE, import_extension), ObserverLibrary())


class ObserverLibrary:
    """The observer that fits the engine which is loaded now."""

    def __init__(self) -> None:
        self._sources = ENGINE.read_sources()

    def compile(self) -> None:
        """Compile it, if that is still to be done.

        Raises:
            BuildError: it cannot be built.
        """
        failure = try_build(OBSERVER)
        if failure is not None:
            raise failure

    def load(self) -> ModuleType:
        """Return it as a module.

        Raises:
            BuildError: it cannot be built, does not load, or fits no more.
        """
        if ENGINE.read_sources() != self._sources:  # an upgrade, say: what the two know of each other may be another
            raise BuildError("the C++ of polycast was changed after its engine was loaded. Start the program anew.")
        loaded = load_prebuilt(OBSERVER, import_extension) or load_built(cache_directory(), OBSERVER, import_extension)
        return loaded[0]
