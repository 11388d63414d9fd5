"""`backends`: the status of each device type, in a mapping that prints as a table."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from ..errors import BackendConflictError
from ..policy.names import dtype_name
from ..policy.result import Result, Rows, plain_data
from ..torch_internals.dispatcher import autocast_supported_devices
from .backend_loader import BackendLoader, BackendStatus
from .hookspecs import ENTRY_POINT_GROUP
from .registry import discovery_hint, registry, torch_device_type

_UNNAMED = "privateuseone"
"""torch's name of an out-of-tree device that no plugin has named."""
_COLUMNS = ("device", "state", "default", "distribution", "reason")


class BackendStatuses(Mapping[str, BackendStatus], Result):
    """The status of each device type, in alphabetical order; each is found when it is first read, and then kept.

    Args:
        find: a function for each device type that returns its status, and may import a plugin.
    """

    min_width: ClassVar[int] = 1000  # tables are as wide as they need

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


def backends() -> Mapping[str, BackendStatus]:
    """Return the status of every device type that has a backend or a torch Autocast key, in a read-only mapping.

    A status is found when it is first read, which imports the plugin of that device only. ``print`` and notebooks show
    a table of all.

    Raises:
        ValueError: a ``POLYCAST_`` variable has an invalid value.

    Example:
        >>> import polycast
        >>> polycast.backends()["cpu"].state
        'ready'
    """
    find = {name: partial(_status, loader) for name, loader in registry.loaders().copy().items()}
    will_be_named = any(torch_device_type(name) is None for name in find)  # by a plugin, when it is imported
    for name in autocast_supported_devices():
        if name not in find and not (will_be_named and name == _UNNAMED):
            find[name] = partial(_missing, name)
    return BackendStatuses(find)


def _status(loader: BackendLoader) -> BackendStatus:
    status, extensions = loader.status(), registry.extensions_of(loader.device_type)
    if loader.current is None:
        return status
    with suppress(Warning):  # that an extension is broken, which its name here says
        extensions.names()
    given = (loader.current, *extensions.get())
    packages = tuple(package for each in given for package in each.ops_in_cpp)
    status = replace(status, extensions=extensions.names(), ops_in_cpp=packages)
    try:
        extensions.policies(loader.current)
    except BackendConflictError as error:
        return replace(status, state="conflict", reason=str(error))
    return status


def _missing(name: str) -> BackendStatus:
    reason = (
        f"A plugin is needed: no distribution has an entry point {name!r} in the group "
        f"{ENTRY_POINT_GROUP!r}.{discovery_hint()}"
    )
    return BackendStatus(name, "missing", reason)
