"""Load the native engine."""

import functools
from pathlib import Path

from ...toolchain.cache_folder import cache_directory
from ...toolchain.load import BuildableLibrary, import_extension, load_built, load_prebuilt
from .engine import NativeEngine

ENGINE = BuildableLibrary(str(__package__), "polycast_native", "the native engine", folders=(".", "common", "recipes"))


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
    return None if found is None else NativeEngine(*found, ENGINE.read_sources())


@functools.cache
def _load(cache: Path) -> NativeEngine:
    return NativeEngine(*load_built(cache, ENGINE, import_extension), ENGINE.read_sources())
