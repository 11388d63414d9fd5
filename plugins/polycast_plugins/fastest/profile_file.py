"""The files of profiles in polycast's cache, which only the user can write."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from polycast.toolchain.cache_folder import cache_directory, check_folders, make_folders, others_can_write
from polycast.toolchain.cpp_library import BuildError

from .conditions import Conditions
from .device_profile import DeviceProfile

_LONGEST_WAIT = 45.0
"""Seconds to wait for another process that measures, which may hang. The first calls on a GPU may take 30 s of them."""
_QUIET_WAIT = 1.0
FOLDER = "profiles"


class ProfileFileError(Exception):
    """A file of the cache is not used, or cannot be written. The text says why."""


def announce(text: str) -> None:
    """Print a line on stderr, if it is open."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a daemon's stderr may be closed, or None
        sys.stderr.write(f"polycast: {text}\n")
        sys.stderr.flush()


def read(conditions: Conditions) -> DeviceProfile | None:
    """Return the profile that was measured under these conditions, or None if there is none.

    Raises:
        ProfileFileError: there is one, but it is not used.
    """
    try:
        path = _path(conditions)
        if not path.exists():
            return None
        check_folders(path.parent.parent, path.parent)
        problem = others_can_write(path)
        if problem is not None:
            raise ProfileFileError(f"{problem}, so it may be somebody else's")
        profile = DeviceProfile.from_json(path.read_text(encoding="utf-8"))
    except (BuildError, OSError) as error:
        raise ProfileFileError(str(error)) from error
    except ValueError as error:
        raise ProfileFileError(f"{path} is damaged: {error}") from error
    difference = conditions.difference(profile)
    if difference is not None:
        raise ProfileFileError(f"{path} was measured elsewhere: {difference}")
    return profile


def write(conditions: Conditions, profile: DeviceProfile) -> Path:
    """Write a profile to the cache atomically, replacing any earlier one, and return its path.

    Raises:
        ProfileFileError: it cannot be written, or others could.
    """
    try:
        path = _path(conditions)
        make_folders(path.parent.parent, path.parent)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", encoding="utf-8", delete=False) as file:
            try:
                file.write(profile.to_json())
                file.close()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except (BuildError, OSError) as error:
        raise ProfileFileError(str(error)) from error
    return path


@contextlib.contextmanager
def locked(conditions: Conditions) -> Iterator[None]:
    """Hold the lock of measuring a device, so that no other process of the user measures it; if possible."""
    from filelock import FileLock, Timeout

    lock = None
    try:
        path = _path(conditions)
        make_folders(path.parent.parent, path.parent)
        lock = FileLock(path.with_name(f"{conditions.device_type}.lock"))
        try:
            lock.acquire(timeout=_QUIET_WAIT)
        except Timeout:
            announce(f"waiting for another process that measures {conditions.device_type} ...")
            lock.acquire(timeout=_LONGEST_WAIT)
    except (BuildError, OSError, NotImplementedError, Timeout):  # measuring twice is no error
        pass
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _path(conditions: Conditions) -> Path:
    return cache_directory() / FOLDER / conditions.file_name
