"""All counts of a run, and how two runs are combined."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin, get_type_hints

from polycast.common.cached_property import cached_property

from .matmul_records import Matmul
from .matmuls import recipe_share
from .numerics_records import NumericsRecord
from .records import Cast, Chain, Compiled, Counts, Flow, LowBit, Module, NonFinite, Op, Region
from .sums import add, combine


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

    @cached_property
    def total(self) -> Counts:
        """The counts of all ops."""
        return total_of(self.ops)

    @property
    def fast_share(self) -> float | None:
        """The share of calls with floating-point tensors that computed in a fast dtype; None without such calls."""
        return self._share(self.total.compute_dtypes)

    @property
    def fast_time_share(self) -> float | None:
        """The share of the time in ops that calls in a fast dtype took; None without ``timing=True``."""
        return self._share(self.total.seconds)

    @property
    def recipe_share(self) -> float | None:
        """The share of the floating-point operations in matmuls that recipes computed; None without a recipe."""
        return recipe_share(self.matmuls)

    def _share(self, numbers: Mapping[str, float]) -> float | None:
        """Return the share of numbers by dtype that the fast dtypes have; None if there are no numbers."""
        everything = sum(numbers.values())
        fast = {dtype for dtypes in self.run.devices.values() for dtype in dtypes if dtype != "float32"}
        return sum(numbers.get(dtype, 0) for dtype in fast) / everything if everything else None


LISTS: dict[str, type[Any]] = {
    name: get_args(hint)[0] for name, hint in get_type_hints(Facts).items() if get_origin(hint) is tuple
}
"""The lists of facts, by name, and the class of their records."""


def total_of(counts: Iterable[Counts]) -> Counts:
    """Return the sum of counts."""
    total = Counts()
    for each in counts:
        total = add(total, Counts(**{name: getattr(each, name) for name in Counts.__dataclass_fields__}))
    return total


def combined(left: Facts, right: Facts, sign: int) -> Facts:
    """Return the sum of two runs, or their difference (sign -1)."""
    devices = {
        device: list(dict.fromkeys([*left.run.devices.get(device, []), *right.run.devices.get(device, [])]))
        for device in dict.fromkeys([*left.run.devices, *right.run.devices])
    }
    run = replace(
        left.run,
        seconds=left.run.seconds + sign * right.run.seconds,
        runs=left.run.runs + sign * right.run.runs,
        steps=left.run.steps + sign * right.run.steps,
        observed_steps=left.run.observed_steps + sign * right.run.observed_steps,
        devices=devices,
        emulated=_combined_reasons(left.run.emulated, right.run.emulated, sign),
    )
    lists: dict[str, Any] = {name: combine(getattr(left, name), getattr(right, name), sign) for name in LISTS}
    nonfinite = (left.nonfinite or right.nonfinite) if sign > 0 or right.nonfinite is None else None
    return Facts(run=run, nonfinite=nonfinite, **lists)


def _combined_reasons(left: dict[str, str], right: dict[str, str], sign: int) -> dict[str, str]:
    return {**right, **left} if sign > 0 else {key: text for key, text in left.items() if key not in right}
