"""The folder in which polycast keeps builds and profiles, and whether what is in it can be trusted.

Loading a library runs its code as the user. So files are read only from folders that belong to the user or to root,
and that nobody else can write. An untrusted cache is not repaired: it may have been modified long ago.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..common.replaced_file import replaced_file
from .cpp_library import BuildError

_Result = TypeVar("_Result")


class UntrustedCacheError(BuildError):
    """Other users can write to the cache, so nothing is loaded from it."""


def cache_directory() -> Path:
    """Return the cache's directory: ``$XDG_CACHE_HOME/polycast``, or ``~/.cache/polycast``.

    Raises:
        BuildError: no home directory is known.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if configured.is_absolute():  # the XDG Base Directory Specification says to ignore relative paths
        return configured / "polycast"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    if not home.is_absolute():
        raise BuildError("no home directory is known to cache it in. Set XDG_CACHE_HOME to a folder of yours, or HOME.")
    return home / ".cache" / "polycast"


class CacheFile:
    """A text file in polycast's cache, which only the user can write.

    Attributes:
        path: its path.

    Raises:
        OSError: no home directory is known.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._cache = _or_os_error(cache_directory)
        self.path = self._cache / folder / name

    def read(self) -> str | None:
        """Return the text, or None if there is no such file.

        Raises:
            OSError: it cannot be read, or other users could have written it.
            UnicodeDecodeError: it is no text.
        """
        if not self.path.exists():
            return None
        _or_os_error(check_folders, self._cache, self.path.parent)
        problem = others_can_write(self.path)
        if problem is not None:
            raise PermissionError(f"{problem}, so it may be somebody else's")
        return self.path.read_text(encoding="utf-8")

    def make_folder(self) -> None:
        """Create the folder of the file, accessible to the user only.

        Raises:
            OSError: it cannot be created, or other users can write to it.
        """
        _or_os_error(make_folders, self._cache, self.path.parent)

    def write(self, text: str) -> None:
        """Write the file atomically, replacing any earlier one.

        Raises:
            OSError: it cannot be written, or other users could.
        """
        self.make_folder()
        with replaced_file(self.path) as complete:
            complete.touch(mode=0o600)
            complete.write_text(text, encoding="utf-8")


def _or_os_error(function: Callable[..., _Result], *args: Path) -> _Result:
    try:
        return function(*args)
    except BuildError as error:
        raise PermissionError(str(error)) from error


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
    problems = [_anyone_can_rename_in(parent), *map(others_can_write, _path_to(cache, folder))]
    for problem in filter(None, problems):
        raise UntrustedCacheError(
            f"{problem}, so what is in it may be somebody else's. Remove {cache}, which polycast then creates "
            "again, or set XDG_CACHE_HOME to a folder that only you can write."
        )


def _path_to(cache: Path, folder: Path) -> list[Path]:
    parts = folder.relative_to(cache).parts
    return [cache.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def others_can_write(path: Path) -> str | None:
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
