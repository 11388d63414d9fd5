"""Where builds are kept, and whether what lies there can be trusted.

A library that is loaded can do whatever the user can, so it is taken only from where nobody else can have put it: from
folders and files that belong to the user, or to root, who can do anything anyway, and that only their owner can write.
What cannot be trusted is not mended, for it may have been changed long ago.
"""

import os
import stat
from pathlib import Path


class BuildError(Exception):
    """The native engine cannot be had; the text says why, what to do, and names the log where there is one."""


class UntrustedCacheError(BuildError):
    """The cache is where others can write, so nothing is loaded from it."""


def cache_directory() -> Path:
    """Return where builds are kept: ``$XDG_CACHE_HOME/polycast``, or ``~/.cache/polycast``.

    Raises:
        BuildError: there is no such place.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # "consider the path invalid and ignore it", says the XDG Base Directory Specification
        return named / "polycast"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    if not home.is_absolute():
        raise BuildError("no home directory is known to keep it in. Set XDG_CACHE_HOME to a folder of yours, or HOME.")
    return home / ".cache" / "polycast"


def make_folders(cache: Path, folder: Path) -> None:
    """Make the cache and a folder in it, which only the user can enter; those that are there stay as they are."""
    cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in _chain(cache, folder):
        made.mkdir(mode=0o700, exist_ok=True)


def check_folders(cache: Path, folder: Path) -> None:
    """Check that only the user can write in the cache and in a folder in it, as far as they are there.

    Raises:
        UntrustedCacheError: others can.
    """
    above = Path(os.path.realpath(cache)).parent
    problems = [_others_can_rename_in(above), *map(_others_can_write, _chain(cache, folder))]
    for problem in filter(None, problems):
        raise UntrustedCacheError(
            f"{problem}, so others may have put there what would be loaded. Remove {cache}, to have it made anew, or "
            "set XDG_CACHE_HOME to a folder that only you can write."
        )


def is_trusted(file: Path) -> bool:
    """Say whether a file in a checked folder is there, and such that only the user can have written it."""
    return file.is_file() and _others_can_write(file) is None


def _chain(cache: Path, folder: Path) -> list[Path]:
    between = folder.relative_to(cache).parts
    return [cache.joinpath(*between[:depth]) for depth in range(len(between) + 1)]


def _others_can_write(path: Path) -> str | None:
    """Say why others may have written what is at a path, which may be a link."""
    if not hasattr(os, "geteuid"):  # Windows has other owners and other permissions, and gives each user a cache
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


def _others_can_rename_in(folder: Path) -> str | None:
    """Say whether anybody may put another folder in the place of one that is in this one, as sticky folders forbid."""
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        return None
    if hasattr(os, "geteuid") and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"{folder} can be written by everybody ({stat.filemode(mode)})"
    return None
