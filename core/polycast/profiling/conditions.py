"""`Conditions`: what a profile depends on. A profile of other conditions is not used."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from typing_extensions import Self

from ..common.versions import package_versions
from ..plugins.backend import Backend
from ..plugins.checks import PLUGIN_ERRORS
from ..plugins.registry import registry
from .device_profile import DeviceProfile


@dataclass(frozen=True)
class Conditions:
    """The device, the number of threads and the versions that a profile is measured with."""

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
            details = {str(name): str(value) for name, value in backend.device_details().items()}
        except PLUGIN_ERRORS as error:
            details = {"error": f"device_details() raised {type(error).__name__}: {error}"}
        device = details.pop("name", device_type)
        details |= _unusual_settings()
        version = registry.version(backend) or f"{type(backend).__module__}.{type(backend).__qualname__}"
        versions = {**package_versions(), "backend": version}
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


_USUAL_PRECISIONS = ("none", "ieee")
"""Without a setting, and the same set."""


def _unusual_settings() -> dict[str, str]:
    """Return the settings of torch, of those that select kernels, that are not the default."""
    attention: dict[str, Callable[[], bool]] = {
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "cuDNN": torch.backends.cuda.cudnn_sdp_enabled,
        "math": torch.backends.cuda.math_sdp_enabled,
    }
    off = [name for name, is_enabled in attention.items() if not is_enabled()]
    precisions = {
        f"{name} of float32 matmuls": library.matmul.fp32_precision
        for name, library in (("oneDNN's precision", torch.backends.mkldnn), ("CUDA's precision", torch.backends.cuda))
    }
    return {
        **({"attention without": ", ".join(off)} if off else {}),
        **({} if torch.backends.mkldnn.enabled else {"oneDNN": "off"}),
        **({"algorithms": "deterministic"} if torch.are_deterministic_algorithms_enabled() else {}),
        **{name: value for name, value in precisions.items() if value not in _USUAL_PRECISIONS},
    }


def _flat(conditions: Conditions | DeviceProfile) -> Iterator[tuple[str, str]]:
    yield "device type", conditions.device_type
    yield "device", conditions.device
    yield "number of threads", str(conditions.threads)
    yield from ((f"version of {name}", version) for name, version in conditions.versions.items())
    yield from conditions.details.items()
