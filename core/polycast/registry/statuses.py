"""The status of each device type, in a mapping that prints as a table."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from typing_extensions import override

from ..errors import BackendBrokenError, BackendConflictError, BackendNotFoundError
from ..policy.names import dtype_name
from ..policy.result import Result, Rows, plain_data
from ..torch_internals.dispatcher import autocast_supported_devices
from .backend import Availability
from .backend_loader import BackendLoader
from .checks import ask
from .hookspecs import ENTRY_POINT_GROUP, GENERIC
from .registry import discovery_hint, registry, torch_device_type

State: TypeAlias = Literal["ready", "generic", "unavailable", "broken", "blocked", "conflict", "missing"]


@dataclass(frozen=True)
class BackendStatus:
    """The status of the backend of one device type.

    Attributes:
        device_type: the device type.
        state: ``ready``; ``generic``: ready, by a generic backend, as no package has one for the device;
            ``unavailable``: loaded, but the device cannot be used now; ``broken``: its plugin cannot be loaded;
            ``blocked``: by POLYCAST_BLOCK; ``conflict``: several distributions supply it; ``missing``: torch has an
            Autocast key for the device, but no backend is installed.
        reason: why it is not ready, or what there is to say about one that is.
        default_dtype: the backend's default fast dtype; None if no backend is loaded.
        distribution: the distribution that supplies it; empty for a backend registered by hand, for a
            conflict, and if there is none.
        version: the version of that distribution.
        replaces: the distributions that supply this device type too, and are not used.
        extensions: what other packages add to the device, in the order in which their kernels are asked; with why, if
            one of them is broken or cannot be used now.
        ops_in_cpp: the packages with C++ ops of the backend, and of the extensions that can be used.
    """

    device_type: str
    state: State
    reason: str = ""
    default_dtype: torch.dtype | None = None
    distribution: str = ""
    version: str = ""
    replaces: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    ops_in_cpp: tuple[str, ...] = ()

    @property
    def is_usable(self) -> bool:
        """Whether regions for the device are enabled now, since its state is ``ready`` or ``generic``."""
        return self.state in ("ready", "generic")


_UNNAMED = "privateuseone"
"""torch's name of an out-of-tree device that no plugin has named."""
_COLUMNS = ("device", "state", "default", "distribution", "reason")


class BackendStatuses(Mapping[str, BackendStatus], Result):
    """The status of each device type, in alphabetical order; each is found when it is first read, and then kept.

    Args:
        find: a function for each device type that returns its status, and may import a plugin.
    """

    def __init__(self, find: Mapping[str, Callable[[], BackendStatus]]) -> None:
        self._find = dict(sorted(find.items()))
        self._found: dict[str, BackendStatus] = {}

    @override
    def __getitem__(self, device_type: str) -> BackendStatus:
        if device_type not in self._found:
            self._found[device_type] = self._find[device_type]()
        return self._found[device_type]

    @override
    def __contains__(self, device_type: object) -> bool:
        return device_type in self._find

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._find)

    @override
    def __len__(self) -> int:
        return len(self._find)

    def in_use(self) -> dict[str, list[str]]:
        """Return the packages, with versions, of the backend and extensions of each device that computed in regions."""
        found = {}
        for name in sorted(registry.used):
            if (backend := registry.loaded(name)) is not None and registry.extensions_of(name).are_known:
                packages = map(registry.source, [backend, *registry.extensions(name)])
                found[name] = [*dict.fromkeys(f"{of} {version}" if of else "by hand" for of, version in packages)]
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ({name: partial(replace, status) for name, status in self.items()},)

    def _row(self, status: BackendStatus) -> tuple[str, ...]:
        dtype = "-" if status.default_dtype is None else dtype_name(status.default_dtype)
        source = f"{status.distribution} {status.version}".strip() or "-"
        return status.device_type, status.state, dtype, source, status.reason

    @override
    def to_dict(self) -> dict[str, Any]:
        return {device_type: plain_data(status) for device_type, status in self.items()}

    @override
    def tables(self) -> list[tuple[tuple[str, ...], Rows]]:
        return [(_COLUMNS, [self._row(status) for status in self.values()])]

    @override
    def lines(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        return str(self)


def statuses() -> BackendStatuses:
    """Return the statuses of all device types; see :func:`polycast.backends`."""
    find = {name: partial(_status, loader) for name, loader in registry.loaders().copy().items()}
    will_be_named = any(torch_device_type(name) is None for name in find)  # by a plugin, when it is imported
    for name in autocast_supported_devices():
        if name not in find and not (will_be_named and name == _UNNAMED):
            loader = registry.discovery().loader_of(name)
            find[name] = partial(_missing, name) if loader is None else partial(_status, loader)
    return BackendStatuses(find)


def _status(loader: BackendLoader) -> BackendStatus:
    """Load a backend and the extensions of its device. Errors of plugins are part of the status."""
    try:
        backend = loader.get()
    except BackendConflictError as error:
        return BackendStatus(loader.device_type, "conflict", str(error))
    except BackendNotFoundError as error:
        return BackendStatus(loader.device_type, "blocked" if loader.blocked else "missing", str(error))
    except BackendBrokenError as error:
        return _of_candidate(BackendStatus(loader.device_type, "broken", str(error)), loader)
    try:
        with loader.announced_if_slow("asking", " whether the device can be used"):
            answer = ask(backend)
    except Warning as error:  # a filter turned it into an error: those who list devices get all of them
        answer = Availability(False, str(error) or type(error).__name__)
    is_generic = loader.by_hand is None and loader.choose().device_type == GENERIC
    state: State = "unavailable" if not answer else "generic" if is_generic else "ready"
    status = _of_candidate(BackendStatus(loader.device_type, state, answer.reason, backend.default_dtype), loader)
    extensions = registry.extensions_of(loader.device_type)
    with suppress(Warning):  # that an extension is broken, which its name here says
        extensions.names()
    packages = tuple(package for each in (backend, *extensions.get()) for package in each.ops_in_cpp)
    status = replace(status, extensions=extensions.names(), ops_in_cpp=packages)
    try:
        extensions.policies(backend)
    except BackendConflictError as error:
        return replace(status, state="conflict", reason=str(error))
    return status


def _of_candidate(status: BackendStatus, loader: BackendLoader) -> BackendStatus:
    """Return a status with the distributions of the chosen candidate and of the others."""
    used = None if loader.by_hand is not None else loader.choose()
    others = tuple(str(candidate) for candidate in loader.candidates if candidate is not used)
    name, version = (used.distribution, used.version) if used else ("", "")
    return replace(status, distribution=name, version=version, replaces=others)


def _missing(name: str) -> BackendStatus:
    reason = (
        f"A plugin is needed: no distribution has an entry point {name!r} in the group "
        f"{ENTRY_POINT_GROUP!r}.{discovery_hint()}"
    )
    return BackendStatus(name, "missing", reason)
