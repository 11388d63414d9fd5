"""The cache of builds: where each build is, whether it is complete, and whether it can be trusted.

Loading a library runs its code as the user. So a build is loaded only from folders and files that belong to the user
or to root, and that nobody else can write. An untrusted cache is not repaired: it may have been modified long ago.
"""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import Self

from .compiler import FLAGS, PYTHON_ABI, Compiler, checksum, find_compiler
from .cpp_library import BuildError, CppLibrary


class UntrustedCacheError(BuildError):
    """Other users can write to the cache, so nothing is loaded from it."""


def cache_directory() -> Path:
    """Return the cache's directory: ``$XDG_CACHE_HOME/polycast``, or ``~/.cache/polycast``.

    Raises:
        BuildError: no home directory is known.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if configured.is_absolute():  # the XDG Base Directory Specification has relative paths ignored
        return configured / "polycast"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    if not home.is_absolute():
        raise BuildError("no home directory is known to cache it in. Set XDG_CACHE_HOME to a folder of yours, or HOME.")
    return home / ".cache" / "polycast"


@dataclass(frozen=True)
class CachedBuild:
    """A library's entry in the cache, for the running torch and the installed compiler; it may not be built yet."""

    library: CppLibrary
    sources: Mapping[str, bytes]
    compiler: Compiler | None
    cache: Path
    folder: Path
    """The folder of this compiler's build; without a compiler, the folder above those of all compilers."""

    @classmethod
    def locate(cls, cache: Path, library: CppLibrary) -> Self:
        """Return the entry of a library."""
        sources = library.read_sources()
        torch_abi = str(torch.compiled_with_cxx11_abi())
        target = (torch.__version__, PYTHON_ABI, torch_abi, sysconfig.get_platform())
        folder = cache / _digest(*target, *(text.hex() for text in sources.values()))
        compiler = find_compiler()
        if compiler is not None:
            folder /= _digest(*compiler, *FLAGS)
        return cls(library, sources, compiler, cache, folder)

    @property
    def path(self) -> Path:
        """The path of the library."""
        return self.folder / f"{self.library.name}.so"

    @property
    def log(self) -> Path:
        """The path of the compiler's output, which exists if the build failed."""
        return self.path.with_suffix(".log")

    def find(self) -> Path | None:
        """Return the path of a complete build; without a compiler, of any compiler's build.

        Raises:
            UntrustedCacheError: other users can write to the cache.
        """
        check_folders(self.cache, self.folder)
        for path in [self.path] if self.compiler else sorted(self.folder.glob(f"*/{self.path.name}")):
            check_folders(self.cache, path.parent)
            if _is_complete(path):
                return path
        return None

    def check_buildable(self, retry: bool = False) -> None:
        """Check that there is a compiler and, unless `retry`, that it has not failed before.

        Raises:
            BuildError: the build is not to be tried.
        """
        if self.compiler is None:
            raise BuildError("no C++ compiler is found. Install one (c++), or name it in the variable CXX.")
        if self.log.exists() and not retry:
            hint = self.library.retry_hint
            raise BuildError(f"it failed before; its output is in {self.log}. {hint[:1].upper()}{hint[1:]}.")


def make_folders(cache: Path, folder: Path) -> None:
    """Create the cache and a folder in it, accessible to the user only. Existing folders keep their permissions.

    Raises:
        UntrustedCacheError: other users can write to them.
    """
    cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in _path_to(cache, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    check_folders(cache, folder)


def check_folders(cache: Path, folder: Path) -> None:
    """Check that only the user can write to the cache and a folder in it, where they exist.

    Raises:
        UntrustedCacheError: other users can.
    """
    parent = Path(os.path.realpath(cache)).parent
    problems = [_anyone_can_rename_in(parent), *map(_others_can_write, _path_to(cache, folder))]
    for problem in filter(None, problems):
        raise UntrustedCacheError(
            f"{problem}, so the libraries in it may be somebody else's. Remove {cache}, which polycast then creates "
            "again, or set XDG_CACHE_HOME to a folder that only you can write."
        )


def _path_to(cache: Path, folder: Path) -> list[Path]:
    parts = folder.relative_to(cache).parts
    return [cache.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _others_can_write(path: Path) -> str | None:
    """Return why another user may have written a path, which may be a link; None if none can."""
    if not hasattr(os, "geteuid"):  # Windows has other permissions, and a cache for each user
        return None
    try:
        link, target = path.lstat(), path.stat()
    except FileNotFoundError:
        return None
    for status in (link, target):
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to another user (uid {status.st_uid})"
    if target.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others ({stat.filemode(target.st_mode)})"
    return None


def _anyone_can_rename_in(folder: Path) -> str | None:
    """Return why anyone may replace a folder in this one; None in a sticky folder."""
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        return None
    if hasattr(os, "geteuid") and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"{folder} can be written by everybody ({stat.filemode(mode)})"
    return None


def _is_complete(library: Path) -> bool:
    expected = library.with_suffix(".sha256")
    try:
        return _is_trusted(library) and _is_trusted(expected) and expected.read_text() == checksum(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _is_trusted(file: Path) -> bool:
    return file.is_file() and _others_can_write(file) is None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]
