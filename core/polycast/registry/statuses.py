"""`BackendStatuses`: the result of ``backends()``, a mapping that prints as a table."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from ..common.html_table import html_table
from ..common.plain_text import as_text, under_the_head
from ..policy.dtypes import dtype_name
from .backend_loader import BackendStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = ("device", "state", "default", "distribution", "reason")
_WIDTH = 1000  # tables are as wide as they need


class BackendStatuses(Mapping[str, BackendStatus]):
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

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ({name: partial(replace, status) for name, status in self.items()},)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for status in self.values():
            dtype = "-" if status.default_dtype is None else dtype_name(status.default_dtype)
            source = f"{status.distribution} {status.version}".strip() or "-"
            yield status.device_type, status.state, dtype, source, status.reason

    def __rich__(self) -> "RenderableType":
        from rich.table import Table

        table = Table(*_COLUMNS, box=under_the_head(), show_edge=False)
        for row in self._rows():
            table.add_row(*row)
        return table

    def __repr__(self) -> str:
        return as_text(self.__rich__(), _WIDTH)

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows())
