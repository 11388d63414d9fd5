"""Load the native engine and its observer."""

import functools
from pathlib import Path
from types import ModuleType

from ...toolchain.build import compile_ahead, import_built, import_prebuilt
from ...toolchain.build_cache import BuildError, cache_directory
from ...toolchain.compiler import read_sources
from ...toolchain.library import Library
from .engine import NativeEngine

_RETRY = "`polycast build` tries again"
ENGINE = Library(str(__package__), "polycast_native", "the native engine", _RETRY, (".", "common"))
OBSERVER = Library(
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
    found = import_prebuilt(ENGINE)
    return None if found is None else NativeEngine(*found, ObserverLibrary())


@functools.cache
def _load(directory: Path) -> NativeEngine:
    return NativeEngine(*import_built(directory, ENGINE), ObserverLibrary())


class ObserverLibrary:
    """The observer that fits the engine which is loaded now."""

    def __init__(self) -> None:
        self._sources = read_sources(ENGINE)

    def compile(self) -> None:
        """Compile it, if that is still to be done.

        Raises:
            BuildError: it cannot be built.
        """
        failure = compile_ahead(OBSERVER)
        if failure is not None:
            raise failure

    def load(self) -> ModuleType:
        """Return it as a module.

        Raises:
            BuildError: it cannot be built, does not load, or fits no more.
        """
        if read_sources(ENGINE) != self._sources:  # an upgrade, say: what the two know of each other may be another
            raise BuildError("the C++ of polycast was changed after its engine was loaded. Start the program anew.")
        extension, _ = import_prebuilt(OBSERVER) or import_built(cache_directory(), OBSERVER)
        return extension
