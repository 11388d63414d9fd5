"""The modules and stacks of a report as data, from which its script makes elements on demand.

Thousands of modules are too many elements for a browser. So the page contains them as lists of numbers. Whatever
modules share (words, rows of ops, lines of stacks) is stored once, and referred to by its number.
"""

from collections.abc import Hashable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from ..records import Module, Op
from ..units import size
from .page import ModuleRow, OpRow, Page
from .words import duration, in_order, pattern, ruled

_T = TypeVar("_T", bound=Hashable)
_NOTHING = -1
"""Stands for a number that the run lacks."""


class Data(NamedTuple):
    """The input of a page's script.

    Attributes:
        json: JSON-safe. ``words``: texts. ``patterns``: the CSS class of each dtype, by the number of its text.
            ``ops``: rows of ops, each ``[op, phase, policy, rule, of]``, where `of` has for each run
            ``[calls, dtypes, casts, bytes]``. ``modules``, in tree order: ``[depth, name, kind, changed, open, ops,
            of]``, with the name relative to the enclosing module; `of` has for each run ``[dtypes, time, casts, share,
            bytes, share]``, with shares in per cent. ``lines``: lines of stacks. ``stacks``: lists of numbers of lines.
            dtypes are ``[dtype, count, dtype, count, ...]``.
        stacks: the numbers of the stacks, by stack.
    """

    json: dict[str, Any]
    stacks: Mapping[tuple[str, ...], int]


class _Numbers(Generic[_T]):
    """Gives each distinct value a number."""

    def __init__(self) -> None:
        self.known: dict[_T, int] = {}

    def __call__(self, value: _T) -> int:
        return self.known.setdefault(value, len(self.known))

    def __iter__(self) -> Any:
        return iter(self.known)


def data_of(page: Page) -> Data:
    """Return the modules and stacks of a page as data."""
    return _Builder(page).data()


class _Builder:
    def __init__(self, page: Page) -> None:
        self._page = page
        self._words: _Numbers[str] = _Numbers()
        self._ops: _Numbers[tuple[Any, ...]] = _Numbers()
        self._patterns: dict[int, str] = {}

    def data(self) -> Data:
        lines: _Numbers[str] = _Numbers()
        stacks: dict[tuple[str, ...], int] = {}
        numbered = []
        for row in self._page.ops:
            for op in row.of:
                if op is not None and op.stack and op.stack not in stacks:
                    stacks[op.stack] = len(stacks)
                    numbered.append([lines(line) for line in op.stack])
        modules = self._modules()
        json = {
            "timed": self._page.timed,
            "modules": modules,
            "ops": list(self._ops),
            "words": list(self._words),
            "patterns": self._patterns,
            "lines": list(lines),
            "stacks": numbered,
        }
        return Data(json, stacks)

    def _modules(self) -> list[list[Any]]:
        found = []
        around: list[str] = []  # the names of the enclosing modules, by depth
        for row in self._page.modules:
            del around[row.depth :]
            outer = f"{around[-1]}." if around and around[-1] else ""
            around.append(row.name)
            found.append(
                [
                    row.depth,
                    self._words(row.name[len(outer) :]),
                    self._words(row.kind),
                    int(row.changed),
                    int(row.is_open),
                    [self._ops(self._op(op)) for op in row.ops],
                    [self._module(row, run, module) for run, module in enumerate(row.of)],
                ]
            )
        return found

    def _module(self, row: ModuleRow, run: int, module: Module | None) -> Any:
        if module is None:
            return _NOTHING
        total = module.total
        time = self._words(duration(sum(total.seconds.values()))) if self._page.timed else _NOTHING
        return [
            self._dtypes(total.compute_dtypes),
            time,
            self._words(f"{total.casts:,}"),
            round(100 * row.casts[run], 1),
            self._words(_bytes(total.cast_bytes)),
            round(100 * row.bytes[run], 1),
        ]

    def _op(self, row: OpRow) -> tuple[Any, ...]:
        known = next(op for op in reversed(row.of) if op is not None)
        of = tuple(self._counts(op) for op in row.of)
        policy, rule = self._words(known.policy or "no policy"), self._words(ruled(known))
        return (self._words(row.op.removeprefix("aten::")), self._words(row.phase), policy, rule, of)

    def _counts(self, op: Op | None) -> Any:
        if op is None:
            return _NOTHING
        dtypes = tuple(self._dtypes(op.compute_dtypes))
        return (self._words(f"{op.calls:,}"), dtypes, self._words(f"{op.casts:,}"), self._words(_bytes(op.cast_bytes)))

    def _dtypes(self, counts: Mapping[str, int]) -> list[int]:
        found = []
        for dtype, count in in_order(counts):
            number = self._words(dtype)
            self._patterns[number] = pattern(dtype)
            found += [number, count]
        return found


def _bytes(count: int) -> str:
    return size(count) if count else "0"
