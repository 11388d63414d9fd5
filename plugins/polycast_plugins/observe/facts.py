"""All counts of a run, and how the counts of two runs are added and subtracted."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_origin, get_type_hints

from .finding import Finding
from .records import Cast, Chain, Compiled, Counts, Decision, LowBit, Module, NonFinite, NumericsRecord, Op, Region
from .remedies import Flow

_R = TypeVar("_R")
DATE = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True)
class MatmulRows:
    """Matmuls whose activations have the same number of rows.

    Attributes:
        op, rows: as in a `Measurement` of a :class:`polycast.DeviceProfile`. If there are many numbers of rows, the
            others are rounded up to powers of two.
        calls, flops: as in a :class:`Matmul`.
        estimates: the seconds of these calls by the profile of the device, by way, such as ``"float32"`` and
            ``"bfloat16"``; empty if the device has no profile.
    """

    op: str
    rows: int
    calls: int = 0
    flops: float = 0.0
    estimates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Matmul:
    """Calls of an op that multiplies matrices.

    Attributes:
        op, phase: the op: mm, addmm, bmm, linear, a convolution, attention, a recurrent layer. If one calls another,
            the outermost is counted. An op that is none of these, such as an einsum outside of autocast, has the
            operations of the ops that it calls.
        module: the module that called it; None: none of the model's.
        device: the device whose autocast it reached; empty: none.
        recipe: the active recipe, ``"int8"``; empty: none.
        declined: why the recipe did not compute it; empty: it did, or there was none.
        dtype: the dtype that it computed in, or with a recipe returned; empty: unknown.
        calls: the number of calls.
        seconds: their time, casts included; 0.0 without ``timing=True``.
        rows: the calls by the number of rows of their activations, as far as known.
        flops: the floating-point operations by the sizes of the tensors, as in ``torch.utils.flop_counter``: two for
            each product of two elements. Masks save none, and the dtype does not matter.
    """

    op: str
    phase: str
    module: str | None
    device: str
    recipe: str = ""
    declined: str = ""
    dtype: str = ""
    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    rows: tuple[MatmulRows, ...] = ()


def is_by_recipe(matmul: Matmul) -> bool:
    """Return whether a recipe computed a matmul."""
    return bool(matmul.recipe) and not matmul.declined


def recipe_share(matmuls: Sequence[Matmul]) -> float | None:
    """Return the share of the operations that recipes computed; None without a recipe."""
    total = sum(each.flops for each in matmuls)
    if total <= 0 or not any(each.recipe for each in matmuls):
        return None
    return sum(each.flops for each in filter(is_by_recipe, matmuls)) / total


_IDENTITY: dict[type[Any], tuple[str, ...]] = {
    Op: ("op", "phase"),
    Decision: ("device", "policy", "rule", "rule_name"),
    Module: ("module",),
    Cast: ("op", "phase", "module", "source", "target", "of", "policy"),
    Region: ("where", "device", "enabled", "dtype", "reason"),
    Compiled: ("region", "module"),
    LowBit: ("device", "recipe", "op", "declined", "package"),
    Matmul: ("op", "phase", "module", "device", "recipe", "declined", "dtype"),
    MatmulRows: ("op", "rows"),
    Chain: ("kind", "ops", "module", "dtype"),
    NumericsRecord: ("module", "op", "role", "dtype", "of", "source"),
    Flow: (
        *("op", "module", "device", "policy", "source", "source_module"),
        *("dtype", "cast", "is_first", "asked_from"),
    ),
    Finding: ("kind", "where", "ops"),
}
"""The fields that identify a record, by its class; the others are its counts."""

_MAXIMA = ("amax",)
"""The fields that are maxima: a sum has the larger one, and a difference that of the minuend."""


def identity_of(record: Any) -> tuple[Any, ...]:
    """Return what records of a class have in common if they are about the same."""
    return tuple(getattr(record, name) for name in _IDENTITY[type(record)])


def combine(left: Iterable[_R], right: Iterable[_R] = (), sign: int = 1) -> tuple[_R, ...]:
    """Merge records, with the counts of `right` added, or subtracted (sign -1). Records without counts are left out."""
    found: dict[tuple[Any, ...], _R] = {}
    for record, factor in (*((each, 1) for each in left), *((each, sign) for each in right)):
        key = identity_of(record)
        found[key] = add(found.get(key), record, factor)
    return tuple(record for record in found.values() if any(_numbers(record)))


def add(record: _R | None, other: _R, factor: int = 1) -> _R:
    """Return a record with the counts of another, times `factor`, added to its own."""
    changed: dict[str, Any] = {}
    for each in fields(other):  # type: ignore[arg-type]
        mine, value = getattr(record, each.name, None), getattr(other, each.name)
        if isinstance(value, bool) or each.name in _IDENTITY.get(type(other), ()):
            continue
        if each.name in _MAXIMA:
            changed[each.name] = max(mine or 0.0, value) if factor > 0 else mine or 0.0
        elif isinstance(value, (int, float)):
            changed[each.name] = (mine or 0) + factor * value
        elif isinstance(value, Mapping):
            sums = {key: (mine or {}).get(key, 0) + factor * value.get(key, 0) for key in {**(mine or {}), **value}}
            changed[each.name] = {key: count for key, count in sums.items() if count}
        elif isinstance(value, Counts):
            changed[each.name] = add(mine, value, factor)
        elif isinstance(value, tuple) and type(next(iter(mine or value), None)) in _IDENTITY:
            changed[each.name] = combine(mine or (), value, factor)
        elif mine:
            changed[each.name] = mine
    result = replace(other, **changed)  # type: ignore[type-var]
    return with_main_decision(result) if isinstance(result, Op) else result  # type: ignore[return-value]


def with_main_decision(op: Op) -> Op:
    """Return an op with the decision for most of its calls as its own."""
    if not op.decisions:
        return op
    decisions = tuple(sorted(op.decisions, key=lambda each: -abs(each.calls)))
    main = decisions[0]
    return replace(op, decisions=decisions, policy=main.policy, rule=main.rule, rule_name=main.rule_name)


def _numbers(value: Any) -> Iterator[float]:
    for each in fields(value):
        item = getattr(value, each.name)
        if isinstance(item, (int, float)) and not isinstance(item, bool) and each.name not in _MAXIMA:
            yield item
        elif isinstance(item, Mapping):
            yield from item.values()
        elif isinstance(item, Counts):
            yield from _numbers(item)


@dataclass(frozen=True)
class Run:
    """The conditions of an observation.

    Attributes:
        seconds: the time from entering the block to leaving it; for a sum of observations, their sum.
        runs: the number of blocks, if this is a sum.
        engine: polycast's engine, ``"native"``.
        versions: the versions of ``polycast``, ``torch`` and ``python``.
        model: the class of the model; None: no model.
        devices: the fast dtypes of regions, by device, the most used first.
        packages: the distributions, with versions, that computed on these devices: the backend's, or ``"by hand"`` if
            the program has registered it, then those of extensions.
        processors: the names of these devices, such as the processor's.
        num_threads: torch's threads.
        date: when the block was entered, as in ``"2026-05-01 09:30 UTC"``.
        command: the command line of the process, at most 300 characters, ``...`` for values of tokens and passwords.
        emulated: why a fast dtype is slow on a device, by device and dtype, as in ``"cpu bfloat16"``.
        threads: ``"this"`` or ``"all"``.
        timing: whether times were measured.
        nonfinite: the option of this name: ``"ignore"``, ``"record"`` or ``"raise"``.
        stacks: whether stacks were kept.
        numerics: whether magnitudes, underflow and overflow were counted.
        steps: the steps of the program, as it counted them with ``Observation.step()``.
        observed_steps: those that were observed; all without a schedule.
    """

    seconds: float = 0.0
    runs: int = 1
    engine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    devices: dict[str, list[str]] = field(default_factory=dict)
    packages: dict[str, list[str]] = field(default_factory=dict)
    processors: dict[str, str] = field(default_factory=dict)
    num_threads: int = 0
    date: str = ""
    command: str = ""
    emulated: dict[str, str] = field(default_factory=dict)
    threads: str = "this"
    timing: bool = False
    nonfinite: str = "ignore"
    stacks: bool = False
    numerics: bool = False
    steps: int = 0
    observed_steps: int = 0


@dataclass(frozen=True)
class Facts:
    """The data of an ``Observation``."""

    run: Run = field(default_factory=Run)
    ops: tuple[Op, ...] = ()
    modules: tuple[Module, ...] = ()
    casts: tuple[Cast, ...] = ()
    regions: tuple[Region, ...] = ()
    compiled: tuple[Compiled, ...] = ()
    chains: tuple[Chain, ...] = ()
    flows: tuple[Flow, ...] = ()
    low_bit: tuple[LowBit, ...] = ()
    matmuls: tuple[Matmul, ...] = ()
    numerics: tuple[NumericsRecord, ...] = ()
    nonfinite: NonFinite | None = None
    total: Counts = field(init=False, compare=False, repr=False)
    """The counts of all ops."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", total_of(self.ops))

    @property
    def fast_share(self) -> float | None:
        """The share of calls with floating-point tensors that computed in a fast dtype; None without such calls."""
        return self._share(self.total.compute_dtypes)

    @property
    def fast_time_share(self) -> float | None:
        """The share of the time in ops that calls in a fast dtype took; None without ``timing=True``."""
        return self._share(self.total.seconds)

    @property
    def fast_flops_share(self) -> float | None:
        """The share of the floating-point operations in matmuls that a fast dtype computed; None without matmuls."""
        return self._share(self.flops)

    @property
    def flops(self) -> Mapping[str, float]:
        """The floating-point operations in matmuls, by the dtype that they computed in."""
        found: dict[str, float] = {}
        for each in self.matmuls:
            found[each.dtype] = found.get(each.dtype, 0.0) + each.flops
        return found

    @property
    def outside(self) -> tuple[Op, ...]:
        """The ops that ran outside of regions; none if there was no region."""
        return tuple(op for op in self.ops if op.is_outside) if self.run.devices else ()

    @property
    def outside_time_share(self) -> float | None:
        """The share of the time in ops of calls outside of regions and backward passes; None without both."""
        if not self.run.devices or not self.total.time:
            return None
        outside = (each for op in self.ops if op.phase == "forward" for each in op.decisions if not each.device)
        return sum(each.seconds for each in outside) / self.total.time

    @property
    def recipe_share(self) -> float | None:
        """The share of the floating-point operations in matmuls that recipes computed; None without a recipe."""
        return recipe_share(self.matmuls)

    def _share(self, numbers: Mapping[str, float]) -> float | None:
        """Return the share of numbers by dtype that the fast dtypes have; None if there are no numbers."""
        everything = sum(numbers.values())
        fast = {dtype for dtypes in self.run.devices.values() for dtype in dtypes if dtype != "float32"}
        return sum(numbers.get(dtype, 0) for dtype in fast) / everything if everything else None


SHARES = ("fast_share", "fast_time_share", "fast_flops_share", "recipe_share")
LISTS = tuple(name for name, hint in get_type_hints(Facts).items() if get_origin(hint) is tuple)
"""The names of the lists of facts."""


def total_of(counts: Iterable[Counts]) -> Counts:
    """Return the sum of counts."""
    total = Counts()
    for each in counts:
        total = add(total, Counts(**{name: getattr(each, name) for name in Counts.__dataclass_fields__}))
    return total


def combined(left: Facts, right: Facts, sign: int) -> Facts:
    """Return the sum of two runs, or their difference (sign -1)."""
    run = replace(
        left.run,
        seconds=left.run.seconds + sign * right.run.seconds,
        runs=left.run.runs + sign * right.run.runs,
        steps=left.run.steps + sign * right.run.steps,
        observed_steps=left.run.observed_steps + sign * right.run.observed_steps,
        devices=_united(left.run.devices, right.run.devices),
        packages=_united(left.run.packages, right.run.packages),
        processors=right.run.processors | left.run.processors,
        emulated=_combined_reasons(left.run.emulated, right.run.emulated, sign),
    )
    lists: dict[str, Any] = {name: combine(getattr(left, name), getattr(right, name), sign) for name in LISTS}
    nonfinite = (left.nonfinite or right.nonfinite) if sign > 0 or right.nonfinite is None else None
    return Facts(run=run, nonfinite=nonfinite, **lists)


def _united(left: dict[str, list[str]], right: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        device: list(dict.fromkeys([*left.get(device, []), *right.get(device, [])]))
        for device in dict.fromkeys([*left, *right])
    }


def _combined_reasons(left: dict[str, str], right: dict[str, str], sign: int) -> dict[str, str]:
    return {**right, **left} if sign > 0 else {key: text for key, text in left.items() if key not in right}


class RecipeCounts:
    """Counts of calls by thread, so that threads need no lock."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str, str, str, str, str], int] = {}

    def note(self, device_type: str, recipe: str, op: str, reason: str | None, package: str) -> None:
        """Count a call."""
        key = threading.get_ident(), device_type, recipe, op, reason or "", package
        self._counts[key] = self._counts.get(key, 0) + 1

    def records(self) -> tuple[LowBit, ...]:
        """Return the counts, the largest first."""
        total: Counter[tuple[str, str, str, str, str]] = Counter()
        for (_, *key), calls in self._counts.copy().items():
            device, recipe, op, reason, package = key
            total[device, recipe, op, reason, package] += calls
        return tuple(LowBit(*key[:4], calls=calls, package=key[4]) for key, calls in total.most_common())
