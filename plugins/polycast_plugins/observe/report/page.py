"""The contents of a report of one run, or of two side by side, before it is rendered.

A value `of` the runs is a tuple with one entry for each run, the one before first. An entry that a run lacks is None.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from ..facts import Facts, identity_of, total_of
from ..finding import Finding, with_remedies_once
from ..findings import findings_of
from ..records import Cast, Compiled, Counts, Module, NumericsRecord, Op, Region

PHASES = ("forward", "backward")
_MAX_CASTS = 25
_OPEN_MODULES = 40

_NOT_COMPARED = {"seconds", "cast_seconds", "stack"}

_R = TypeVar("_R")
_Of = tuple[_R | None, ...]


@dataclass(frozen=True)
class Place:
    """The place of a finding: `target` is the id of the row of its module, if there is one."""

    where: str
    what: str
    target: str


@dataclass(frozen=True)
class Found:
    """Findings of one kind with one remedy, the costliest place first.

    Attributes:
        state: ``"gone"`` or ``"new"`` if only one of two runs has them, else empty.
        stack: the Python stack of the call in question, if known.
    """

    kind: str
    remedy: str
    state: str
    places: tuple[Place, ...]
    stack: tuple[str, ...]


@dataclass(frozen=True)
class OpRow:
    """An op in one pass.

    Attributes:
        changed: whether the runs differ in it.
        inner: whether only other ops called it, without a policy.
        outside: whether it ran outside of regions only, in runs that have regions.
    """

    op: str
    phase: str
    of: _Of[Op]
    changed: bool
    inner: bool
    outside: bool = False


@dataclass(frozen=True)
class ModuleRow:
    """A row of the tree of modules.

    Attributes:
        id: the anchor in the page.
        name: the full name; empty for the model itself.
        depth: the number of enclosing modules.
        casts, bytes: for each run, the share of the enclosing module's, from 0 to 1; with two runs, the share of the
            larger one.
        ops: its own ops.
        changed: whether the runs differ in it or in a module inside.
        is_open: whether it is open at first.
    """

    id: str
    name: str
    kind: str
    depth: int
    of: _Of[Module]
    casts: tuple[float, ...]
    bytes: tuple[float, ...]
    ops: tuple[OpRow, ...]
    changed: bool
    is_open: bool


@dataclass(frozen=True)
class Page:
    """The contents of a report.

    Attributes:
        phases: the counts of each run in the forward pass, in the backward pass and, if there are any, of ops that ran
            outside of regions only.
    """

    runs: tuple[Facts, ...]
    phases: Mapping[str, tuple[Counts, ...]]
    found: tuple[Found, ...]
    modules: tuple[ModuleRow, ...]
    ops: tuple[OpRow, ...]
    casts: tuple[_Of[Cast], ...]
    more_casts: int
    numerics: tuple[_Of[NumericsRecord], ...]
    regions: tuple[_Of[Region], ...]
    compiled: tuple[_Of[Compiled], ...]

    @property
    def compares(self) -> bool:
        """Whether there are two runs."""
        return len(self.runs) == 2

    @property
    def timed(self) -> bool:
        """Whether a run has times."""
        return any(run.run.timing for run in self.runs)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that ops computed in, the most used first."""
        counts: dict[str, int] = {}
        for run in self.runs:
            for dtype, count in run.total.compute_dtypes.items():
                counts[dtype] = counts.get(dtype, 0) + count
        return tuple(sorted(counts, key=lambda dtype: -counts[dtype]))


def page_of(facts: Facts, before: Facts | None = None) -> Page:
    """Return the contents of the report of a run, or of a run and one before it."""
    runs = (facts,) if before is None else (before, facts)
    modules = _module_rows(runs)
    ids: dict[str | None, str] = {row.name: row.id for row in modules}
    ops = _op_rows(tuple(each.ops for each in runs), has_regions=any(each.run.devices for each in runs))
    casts = sorted(
        _together(each.casts for each in runs),
        key=lambda of: -_most(of, "bytes"),
    )
    return Page(
        runs=runs,
        phases=_phases(ops, len(runs)),
        found=tuple(
            replace(found, remedy=remedy)
            for (found,), remedy in with_remedies_once((each,) for each in _found(runs, ids))
        ),
        modules=modules,
        ops=ops,
        casts=tuple(casts[:_MAX_CASTS]),
        more_casts=len(casts[_MAX_CASTS:]),
        numerics=_numerics(runs),
        regions=_together(each.regions for each in runs),
        compiled=_together(each.compiled for each in runs),
    )


def _phases(rows: Sequence[OpRow], runs: int) -> dict[str, tuple[Counts, ...]]:
    parts: dict[str, list[OpRow]] = {phase: [] for phase in PHASES}
    for row in rows:
        parts.setdefault("outside of regions" if row.outside else row.phase, []).append(row)
    return {
        phase: tuple(total_of(op for row in of_part if (op := row.of[run]) is not None) for run in range(runs))
        for phase, of_part in parts.items()
    }


def _numerics(runs: tuple[Facts, ...]) -> tuple[_Of[NumericsRecord], ...]:
    """Return the records of numerics in groups, those that overflow first, then those of which most underflows."""
    of = _together(each.numerics for each in runs)
    return tuple(sorted(of, key=lambda of: (-_most(of, "overflow_share"), -_most(of, "underflow_share"))))


def _found(runs: tuple[Facts, ...], ids: Mapping[str | None, str]) -> Iterator[Found]:
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for of in _together(map(findings_of, runs)):
        finding = next(each for each in reversed(of) if each is not None)
        state = "" if None not in of else "new" if of[-1] is not None else "gone"
        groups.setdefault((finding.kind, finding.remedy, state), []).append(finding)
    stacks = [facts.nonfinite.stack for facts in runs if facts.nonfinite is not None]
    for (kind, remedy, state), findings in groups.items():
        yield Found(
            kind=kind,
            remedy=remedy,
            state=state,
            places=tuple(
                Place(each.where, each.what, ids.get(each.module, ""))
                for each in sorted(findings, key=lambda each: -each.bytes)
            ),
            stack=stacks[-1] if kind == "nonfinite" else (),
        )


def _op_rows(of: tuple[tuple[Op, ...], ...], *, has_regions: bool = False) -> tuple[OpRow, ...]:
    rows = [
        OpRow(
            op,
            phase,
            of=each,
            changed=_differ(each),
            inner=all(record.is_inner for record in each if record is not None),
            outside=has_regions and all(record.is_outside for record in each if record is not None),
        )
        for each in _together(of)
        for op, phase in [_first(each, "op", "phase")]
    ]
    return tuple(sorted(rows, key=lambda row: (-_most(row.of, "time"), -_most(row.of, "calls"))))


def _module_rows(runs: tuple[Facts, ...]) -> tuple[ModuleRow, ...]:
    of = {_first(each, "module")[0]: each for each in _together(each.modules for each in runs)}
    inner: dict[str | None, list[str]] = {}
    for name in of:
        inner.setdefault(_around(name, of), []).append(name)
    rows: list[ModuleRow] = []
    # Not recursive, because models may be nested deeper than Python's stack.
    waiting = [(name, 0) for name in reversed(inner.get(None, []))]
    while waiting:
        name, depth = waiting.pop()
        within = inner.get(name, [])
        rows.append(
            ModuleRow(
                id=f"m{len(rows)}",
                name=name,
                kind=_first(of[name], "kind")[0],
                depth=depth,
                of=of[name],
                casts=_share_of_around(of, name, "casts"),
                bytes=_share_of_around(of, name, "cast_bytes"),
                ops=tuple(
                    row
                    for row in _op_rows(tuple(() if each is None else each.ops for each in of[name]))
                    if not row.inner
                ),
                changed=_differ(of[name]),
                is_open=bool(within) and (depth == 0 or (depth == 1 and len(of) <= _OPEN_MODULES)),
            )
        )
        waiting += [(each, depth + 1) for each in reversed(within)]
    return tuple(rows)


def _around(name: str, names: Mapping[str, Any]) -> str | None:
    """Return the name of the innermost enclosing module among `names`."""
    while name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return None


def _share_of_around(of: Mapping[str, _Of[Module]], name: str, count: str) -> tuple[float, ...]:
    outer = _around(name, of)
    whole = max(_totals(of[name if outer is None else outer], count))
    return tuple(min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0 for part in _totals(of[name], count))


def _totals(of: _Of[Module], count: str) -> list[float]:
    return [0 if each is None else getattr(each.total, count) for each in of]


def _together(runs: Iterable[Iterable[_R]]) -> tuple[_Of[_R], ...]:
    """Return the records of the runs in groups with equal identities."""
    of = [{identity_of(record): record for record in run} for run in runs]
    return tuple(tuple(each.get(key) for each in of) for key in dict.fromkeys(key for each in of for key in each))


def _first(of: _Of[Any], *names: str) -> tuple[Any, ...]:
    record = next(each for each in of if each is not None)
    return tuple(getattr(record, name) for name in names)


def _most(of: _Of[Any], name: str) -> float:
    return max(float(getattr(each, name)) for each in of if each is not None)


def _differ(of: _Of[Counts]) -> bool:
    return len(of) > 1 and len({_without_times(each) for each in of}) > 1


def _without_times(record: Any) -> str:
    """Return the values of a record without times and stacks, which always differ between runs."""
    if record is None:
        return ""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    inner = [*values.pop("ops", ()), *values.pop("decisions", ()), *filter(None, [values.pop("total", None)])]
    nested = [_without_times(each) for each in inner]
    plain = [
        sorted(value.items()) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in _NOT_COMPARED
    ]
    return repr((plain, nested))
