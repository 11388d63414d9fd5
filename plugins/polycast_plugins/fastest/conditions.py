"""`Conditions`: what a profile depends on. A profile of other conditions is not used."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from typing_extensions import Self

import polycast
from polycast.errors import raise_if_callers
from polycast.plugin import Backend, call_outside

from .device_profile import DeviceProfile


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
