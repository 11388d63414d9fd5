"""Load C++ libraries: a prebuilt one if it fits, else a build from the cache."""

import contextlib
import importlib.machinery
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

from ..common.atfork import fork_safe_lock
from ..errors import raise_if_callers, warn_user
from ..registry.backend import Availability
from .build import find_build, get_or_build
from .cache_folder import UntrustedCacheError, cache_directory
from .cpp_library import BuildError, CppLibrary
from .prebuilt import Prebuilt, find_prebuilt

_Loaded = TypeVar("_Loaded")
_origins: dict[str, str] = {}
"""The origins of the libraries that are loaded, by name."""
_ops_lock = fork_safe_lock()
_ops: dict[str, Availability] = {}
"""Whether ops are loaded, by package."""


class BuildableLibrary(CppLibrary):
    """A library, for tools that build it, and say where it is."""

    @staticmethod
    def of_ops(package: str) -> "BuildableLibrary":
        """Return the library of the ops that a package registers; see :func:`load_ops`."""
        return BuildableLibrary(
            package,
            package.replace(".", "_"),
            f"the ops of {package}",
            "remove that file to try again",
            sources_hint=f"They belong to the distribution of {package}: if that is yours, list *.cpp and *.h in its "
            "package data; else install it with all its files.",
            uses_excerpts=False,
        )

    def find(self) -> str | None:
        """Return where the library is or would be loaded from, in words; None if it is yet to be compiled.

        Raises:
            RuntimeError: it cannot be compiled, as far as known.
        """
        if self.name in _origins:
            return _origins[self.name]
        if (prebuilt := find_prebuilt(self)) is not None:
            return _describe_prebuilt(prebuilt)
        built = find_build(cache_directory(), self)
        return None if built is None else _describe_built(built)

    def is_built(self) -> bool:
        """Return whether the library can be loaded without compiling it."""
        try:
            return self.find() is not None
        except (BuildError, OSError):
            return False

    def build(self) -> str:
        """Compile the library unless it came with polycast or is compiled; return where it is, in words.

        Raises:
            RuntimeError: it cannot be compiled. The next call tries again.
        """
        if (prebuilt := find_prebuilt(self)) is not None:
            return _describe_prebuilt(prebuilt)
        return _describe_built(get_or_build(cache_directory(), self, retry=True))


def try_build(library: CppLibrary) -> Exception | None:
    """Build a library that is to be loaded next, unless it is there; return why that failed.

    Loading holds a lock that a fork takes, and compiling takes long. So callers build first, without the lock.
    """
    try:
        if find_prebuilt(library) is None:
            with contextlib.suppress(UntrustedCacheError):  # loading builds it for this process alone
                get_or_build(cache_directory(), library)
    except Exception as error:
        raise_if_callers(error)
        return error
    return None


def load(library: CppLibrary, open_: Callable[[Path], _Loaded]) -> tuple[_Loaded, str]:
    """Return a library as `open_` loads it, and its origin: a prebuilt one if one fits, else one that is built here.

    Raises and warns as :func:`load_built` does.
    """
    loaded, origin = load_prebuilt(library, open_) or load_built(cache_directory(), library, open_)
    _origins[library.name] = origin
    return loaded, origin


def load_prebuilt(library: CppLibrary, open_: Callable[[Path], _Loaded]) -> tuple[_Loaded, str] | None:
    """Return a prebuilt library as `open_` loads it, and its origin; None if none fits.

    It is unpacked into the cache or, where no library can be written to that or loaded from it, for this process alone.
    """
    found = find_prebuilt(library)
    if found is None:
        return None
    try:
        return open_(found.unpack_into(cache_directory())), _describe_prebuilt(found)
    except (BuildError, ImportError, OSError) as error:
        raise_if_callers(error)
    try:
        with tempfile.TemporaryDirectory(prefix="polycast-") as private:
            return open_(found.unpack(Path(private))), _describe_prebuilt(found)
    except (BuildError, ImportError, OSError) as error:  # it may need a newer libc
        raise_if_callers(error)
        found.note_unloadable(error)
        return None


def load_built(cache: Path, library: CppLibrary, open_: Callable[[Path], _Loaded]) -> tuple[_Loaded, str]:
    """Return a library that is built here as `open_` loads it, and its origin, building it if necessary.

    Raises:
        BuildError: it cannot be built, or does not load.

    Warns:
        UserWarning: other users can write to the cache, so the library was built for this process alone.
    """
    try:
        path = get_or_build(cache, library)
        try:
            return _open(path, open_), _describe_built(path)
        except BuildError:
            # The compiler of another machine may have made it, for another libc.
            with contextlib.suppress(BuildError):
                own = get_or_build(cache, library, own=True)
                if own != path:
                    return _open(own, open_), _describe_built(own)
            raise
    except UntrustedCacheError as error:
        untrusted = error
    try:
        with tempfile.TemporaryDirectory(prefix="polycast-") as private:
            loaded = _open(get_or_build(Path(private), library), open_)
    except (BuildError, OSError) as error:
        raise_if_callers(error)
        raise BuildError(f"{untrusted} It cannot be built elsewhere either: {error}") from error
    warn_user(f"polycast built {library.description} for this process alone, as each process will: {untrusted}")
    return loaded, "compiled here, for this process alone"


def import_extension(path: Path) -> ModuleType:
    """Import an extension module from a path."""
    name = path.stem
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _describe_prebuilt(prebuilt: Prebuilt) -> str:
    return f"came with polycast: {prebuilt.archive}"


def _describe_built(path: Path) -> str:
    return f"compiled here: {path}"


def _open(path: Path, open_: Callable[[Path], _Loaded]) -> _Loaded:
    try:
        return open_(path)
    except (ImportError, OSError) as error:
        raise_if_callers(error)
        raise BuildError(f"{path} does not load: {error}. Remove it to have it built again.") from error


def load_ops(package: str) -> Availability:
    """Build the C++ in a package, unless it is built already for this torch, and load the ops that it registers.

    The package contains ``.cpp`` and ``.h`` files, which register ops with ``TORCH_LIBRARY`` and need no Python. They
    are compiled by the compiler of the native engine, without options for a processor: a function that needs certain
    instructions declares them as its target, and products are fused with sums only where it says so. They may include
    ``parallel.h``, for loops over torch's threads, ``huge_pages.h``, for weights, and ``conversions.h``. A failure is
    returned, for the backend to pass on.

    Args:
        package: the name of the package, such as ``"polycast_plugins.quantize.cpu.native"``.

    Returns:
        Whether the ops are loaded and, if not, why.

    Warns:
        UserWarning: other users can write to the cache of builds, so the ops were built for this process alone.

    Example:
        >>> import polycast
        >>> polycast.plugin.load_ops("polycast.policy").available  # it contains no C++
        False
    """
    if package not in _ops:
        library = BuildableLibrary.of_ops(package)
        failure = try_build(library)
        with _ops_lock:  # an op can be registered once
            if package not in _ops:
                _ops[package] = _load_ops(library, failure)
    return _ops[package]


def _load_ops(library: CppLibrary, failure: Exception | None) -> Availability:
    try:
        if failure is not None:
            raise failure
        load(library, _register_ops)
    except (BuildError, OSError) as error:
        raise_if_callers(error)
        return Availability(False, f"the C++ of {library.package} cannot be loaded: {error}")
    return Availability(True)


def _register_ops(path: Path) -> None:
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
