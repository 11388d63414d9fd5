"""Profiles in polycast's cache, which only the user can write, and the conditions that they depend on."""

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from typing_extensions import Self

import polycast
from polycast.errors import raise_if_callers
from polycast.plugin import Backend, CacheFile, call_outside

from .device_profile import DeviceProfile

_LONGEST_WAIT = 45.0
"""Seconds to wait for another process that measures, which may hang. The first calls on a GPU may take 30 s of them."""
_QUIET_WAIT = 1.0
FOLDER = "profiles"


@dataclass(frozen=True)
class Conditions:
    """The conditions of a measurement: the device, the number of threads, the versions, and what the backend adds."""

    device_type: str
    device: str
    threads: int
    versions: Mapping[str, str]
    details: Mapping[str, str]

    @classmethod
    def now(cls, backend: Backend) -> Self:
        """Return the conditions of this process for a device."""
        device_type = backend.device_type
        try:
            details = {str(name): str(value) for name, value in call_outside(backend.device_details).items()}
        except (Exception, SystemExit) as error:
            raise_if_callers(error)
            details = {"error": f"device_details() raised {type(error).__name__}: {error}"}
        device = details.pop("name", device_type)
        status = polycast.backends()[device_type]
        version = f"{status.distribution} {status.version}".strip()
        version = version or f"{type(backend).__module__}.{type(backend).__qualname__}"
        versions = {"polycast": polycast.__version__, "torch": str(torch.__version__), "backend": version}
        return cls(device_type, device, torch.get_num_threads(), versions, details)

    @property
    def file_name(self) -> str:
        """The name of the file for a profile under these conditions."""
        text = json.dumps([self.device, dict(self.versions), dict(self.details)], sort_keys=True)
        return f"{self.device_type}-{self.threads}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def difference(self, profile: DeviceProfile) -> str | None:
        """Return how the conditions of a profile differ, as the end of a sentence; None if they do not."""
        theirs = dict(_flat(profile))
        for name, value in _flat(self):
            other = theirs.pop(name, "none")
            if other != value:
                return f"its {name} is {other}, and this is {value}"
        return next((f"its {name} is {value}, and this is none" for name, value in theirs.items()), None)


def _flat(conditions: Conditions | DeviceProfile) -> Iterator[tuple[str, str]]:
    yield "device type", conditions.device_type
    yield "device", conditions.device
    yield "number of threads", str(conditions.threads)
    yield from ((f"version of {name}", version) for name, version in conditions.versions.items())
    yield from conditions.details.items()


class ProfileFileError(Exception):
    """A file of the cache is not used, or cannot be written. The text says why."""


def announce(text: str) -> None:
    """Print a line on stderr, if it is open."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a daemon's stderr may be closed, or None
        sys.stderr.write(f"polycast: {text}\n")
        sys.stderr.flush()


def read(conditions: Conditions) -> DeviceProfile | None:
    """Return the profile of these conditions, None if there is none; raise ProfileFileError if it is not used."""
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
    """Write a profile to the cache, replacing any earlier one."""
    try:
        _file(conditions).write(profile.to_json())
    except OSError as error:
        remedy = ". Set XDG_CACHE_HOME to a folder of yours that has room." if error.errno else ""  # else it has one
        raise ProfileFileError(f"{error}{remedy}") from error


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
