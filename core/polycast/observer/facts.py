"""All that was counted of a run, and how two of them are combined."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .records import Cast, Chain, Compiled, Counts, Flow, LowBit, Matmul, Module, NonFinite, Op, Region
from .sums import add, combine


@dataclass(frozen=True)
class Run:
    """Where and how something was observed.

    Attributes:
        seconds: how long, from entering the block to leaving it; of a sum, all together.
        runs: of how many blocks this is the sum.
        engine: polycast's engine, ``"native"`` or ``"reference"``.
        versions: of ``polycast``, ``torch`` and ``python``.
        model: the class of the model; None: without one.
        devices: by device that had an enabled region, the fast dtypes of its regions, the most used first.
        emulated: by device and dtype, ``"cpu bfloat16"``, what its backend says of a fast dtype that is slow there.
        threads: ``"this"`` or ``"all"``.
        timing: whether casts were timed.
        nonfinite: what was to become of inf and nan: ``"ignore"``, ``"record"`` or ``"raise"``.
        stacks: whether the stack of each op's first call was kept.
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


@dataclass(frozen=True)
class Facts:
    """All that was counted; an ``Observation`` is made of it."""

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
    nonfinite: NonFinite | None = None


LISTS: dict[str, type[Any]] = {
    "ops": Op,
    "modules": Module,
    "casts": Cast,
    "regions": Region,
    "compiled": Compiled,
    "chains": Chain,
    "flows": Flow,
    "low_bit": LowBit,
    "matmuls": Matmul,
}
"""The records that facts are lists of, by name."""


def total_of(counts: Iterable[Counts]) -> Counts:
    """Return counts together."""
    total = Counts()
    for each in counts:
        total = add(total, Counts(**{name: getattr(each, name) for name in Counts.__dataclass_fields__}))
    return total


def share(numbers: Mapping[str, float], devices: Mapping[str, Iterable[str]]) -> float | None:
    """Return the share that the fast dtypes have of numbers by dtype; None: there are none."""
    everything = sum(numbers.values())
    fast = {dtype for dtypes in devices.values() for dtype in dtypes if dtype != "float32"}
    return sum(numbers.get(dtype, 0) for dtype in fast) / everything if everything else None


def combined(left: Facts, right: Facts, sign: int) -> Facts:
    """Return what was counted in both, or (sign -1) what was counted in one more than in the other."""
    devices = {
        device: list(dict.fromkeys([*left.run.devices.get(device, []), *right.run.devices.get(device, [])]))
        for device in dict.fromkeys([*left.run.devices, *right.run.devices])
    }
    run = replace(
        left.run,
        seconds=left.run.seconds + sign * right.run.seconds,
        runs=left.run.runs + sign * right.run.runs,
        devices=devices,
        emulated=_together(left.run.emulated, right.run.emulated, sign),
    )
    lists: dict[str, Any] = {name: combine(getattr(left, name), getattr(right, name), sign) for name in LISTS}
    nonfinite = (left.nonfinite or right.nonfinite) if sign > 0 or right.nonfinite is None else None
    return Facts(run=run, nonfinite=nonfinite, **lists)


def _together(left: dict[str, str], right: dict[str, str], sign: int) -> dict[str, str]:
    return {**right, **left} if sign > 0 else {key: text for key, text in left.items() if key not in right}
