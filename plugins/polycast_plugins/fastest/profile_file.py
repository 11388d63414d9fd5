"""The files of profiles in polycast's cache, which only the user can write."""

import contextlib
import sys
from collections.abc import Iterator

from polycast.plugin import CacheFile

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
        file = _file(conditions)
        text = file.read()
        if text is None:
            return None
        profile = DeviceProfile.from_json(text)
    except OSError as error:
        raise ProfileFileError(str(error)) from error
    except ValueError as error:
        raise ProfileFileError(f"{file.path} is damaged: {error}") from error
    difference = conditions.difference(profile)
    if difference is not None:
        raise ProfileFileError(f"{file.path} was measured elsewhere: {difference}")
    return profile


def write(conditions: Conditions, profile: DeviceProfile) -> None:
    """Write a profile to the cache, replacing any earlier one.

    Raises:
        ProfileFileError: it cannot be written, or others could.
    """
    try:
        _file(conditions).write(profile.to_json())
    except OSError as error:
        raise ProfileFileError(str(error)) from error


@contextlib.contextmanager
def locked(conditions: Conditions) -> Iterator[None]:
    """Hold the lock of measuring a device, so that no other process of the user measures it; if possible."""
    from filelock import FileLock, Timeout

    lock = None
    try:
        file = _file(conditions)
        file.make_folder()
        lock = FileLock(file.path.with_name(f"{conditions.device_type}.lock"))
        try:
            lock.acquire(timeout=_QUIET_WAIT)
        except Timeout:
            announce(f"waiting for another process that measures {conditions.device_type} ...")
            lock.acquire(timeout=_LONGEST_WAIT)
    except (OSError, NotImplementedError, Timeout):  # measuring twice is no error
        pass
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _file(conditions: Conditions) -> CacheFile:
    return CacheFile(FOLDER, conditions.file_name)
