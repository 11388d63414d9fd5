"""`BackendStatuses`: the result of ``backends()``, a mapping that prints as a table."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from ..policy.dtypes import dtype_name
from ..policy.result import Result, Rows, plain_data
from .backend_loader import BackendStatus

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
