"""The interface of the observer's C++, and the rows of counts that it returns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from polycast.plugin import dtype_name

from .records import Origin

NO_MODULE = -1

CHAIN_KINDS = ("round_trip", "float32_by_one_input", "unlisted_float32_op", "loss", "loss_root")
"""The kinds of chains, by number. The C++ checks the names when it is loaded."""

NONFINITE = ("ignore", "record", "raise")
"""The reactions to inf and nan, by number. The C++ checks the names when it is loaded."""


class ModuleName(NamedTuple):
    """The name and the class name of a module, and its rule."""

    name: str
    kind: str
    rule: str = ""


@dataclass(frozen=True)
class CastRow:
    """Casts of one kind for one op."""

    source: torch.dtype
    target: torch.dtype
    of_weight: bool
    count: int
    bytes: int
    hits: int
    misses: int
    recasts: int
    recast_bytes: int
    seconds: float


@dataclass(frozen=True)
class SourceRow:
    """Inputs of an op, by the op that made them."""

    op: str | None
    module: int
    dtype: torch.dtype
    cast: torch.dtype | None
    is_first: bool
    asked_from: torch.dtype | None
    count: int
    bytes: int
    casts: int
    cast_bytes: int


@dataclass(frozen=True)
class MatmulRow:
    """Matmuls with activations of the same number of rows; `kind` is the op in a profile of the device."""

    kind: str
    rows: int
    calls: int
    flops: float


@dataclass(frozen=True)
class CountRow:
    """Calls of an op in one module, phase and autocast state, and with one outcome for the recipe, if one was asked."""

    op: str
    backward: bool
    module: int
    device: str | None
    fast: torch.dtype | None
    override: int
    recipe: str | None
    declined: str | None
    calls: int
    inner_calls: int
    flops: float
    matmuls: Sequence[MatmulRow]
    inputs: Sequence[tuple[torch.dtype, int]]
    computes: Sequence[tuple[torch.dtype, int]]
    outputs: Sequence[tuple[torch.dtype, int]]
    seconds: Sequence[tuple[torch.dtype | None, float]]
    casts: Sequence[CastRow]
    stack: Sequence[str] | None
    sources: Sequence[SourceRow]


@dataclass(frozen=True)
class ChainRow:
    """Ops in a row that a finding may be about."""

    kind: int
    ops: Sequence[str]
    override: int
    module: int
    device: str | None
    fast: torch.dtype | None
    consumer: int
    count: int
    bytes: int
    casts: int


@dataclass(frozen=True)
class RegionRow:
    """Regions that one line of the program entered."""

    call_site: str
    by_module_rule: bool
    device: str
    enabled: bool
    dtype: torch.dtype
    entries: int
    unused: int
    ops: int
    compiled: int


@dataclass(frozen=True)
class NumericsRow:
    """Values of an op in one module, phase and dtype; `of` is as in a NumericsRecord, `source` None for results."""

    op: str
    backward: bool
    module: int
    of: str
    source: torch.dtype | None
    dtype: torch.dtype
    count: int
    amax: float
    underflowed: int
    overflowed: int
    zeroed: int
    nonfinite: int


@dataclass(frozen=True)
class NonFiniteRow:
    """The first op that turned finite inputs into inf or nan."""

    op: str
    backward: bool
    module: int
    inf: bool
    nan: bool
    dtype: torch.dtype
    stack: Sequence[str] | None
    count: int


ROWS = {
    each.__name__: each
    for each in (
        *(CastRow, ChainRow, CountRow, MatmulRow),
        *(NonFiniteRow, NumericsRow, RegionRow, SourceRow),
    )
}
"""The classes of rows, which the C++ makes."""


@dataclass(frozen=True)
class Reading:
    """All counts of a recorder.

    Attributes:
        modules: by number.
        entries: (module, calls of it).
        compiled: (compiled region, module, calls).
        overrides: by number; 0 is no override.
    """

    modules: Sequence[ModuleName]
    counts: Sequence[CountRow]
    entries: Sequence[tuple[int, int]]
    chains: Sequence[ChainRow]
    regions: Sequence[RegionRow]
    compiled: Sequence[tuple[str, int, int]]
    numerics: Sequence[NumericsRow]
    overrides: Mapping[int, Any]
    nonfinite: NonFiniteRow | None

    def name_of(self, module: int) -> str | None:
        """Return the name of a module."""
        return None if module == NO_MODULE else self.modules[module].name

    @property
    def gradients(self) -> list[NumericsRow]:
        """The values of the backward pass."""
        return [row for row in self.numerics if row.backward]

    def first_nonfinite(self) -> Origin | None:
        """Return the first op that produced inf or nan; None also without ``nonfinite="record"``."""
        row = self.nonfinite
        if row is None:
            return None
        return Origin(
            op=row.op,
            phase=phase_of(row.backward),
            module=self.name_of(row.module),
            what=" and ".join(name for name in ("inf", "nan") if getattr(row, name)),
            dtype=dtype_name(row.dtype),
            stack=tuple(row.stack or ()),
        )


def phase_of(backward: bool) -> str:
    """Return the phase of a row, as records spell it."""
    return "backward" if backward else "forward"


def read(recorder: "Recorder", modules: Iterable[ModuleName] = ()) -> Reading:
    """Return the counts of a recorder so far; `modules` are those that it knows, by number."""
    raw = recorder.read()
    return Reading(
        modules=tuple(modules),  # after reading: other threads may add modules
        counts=raw["counts"],
        entries=raw["entries"],
        chains=raw["chains"],
        regions=raw["regions"],
        compiled=raw["compiled"],
        numerics=raw["numerics"],
        overrides={number: override for number, (override, _) in raw["overrides"].items()},
        nonfinite=raw["nonfinite"],
    )


class Recorder(Protocol):
    """One observation in C++."""

    def start(self) -> None:
        """Start to count, on this thread or on all."""

    def stop(self) -> None:
        """Stop counting; on any thread."""

    def read(self) -> dict[str, Any]:
        """Return the counts so far; see :func:`read`."""

    def nonfinite_count(self) -> int:
        """Return how many ops have turned finite inputs into inf or nan so far."""

    def add_module(self, address: int, number: int, /) -> None:
        """Count ops of a module, known by its ``id``, under a number."""

    def forget_module(self, address: int, /) -> None:
        """Forget a module that was garbage-collected."""

    def add_parameter(self, parameter: torch.Tensor, module: int, /) -> None:
        """Count the accumulation of a parameter's gradient for a module."""


_MakeRecorder: TypeAlias = Callable[[bool, bool, int, bool, bool], Recorder]


class Observer(Protocol):
    """The C++ module, bound to the native engine."""

    Recorder: _MakeRecorder
    """Takes `all_threads`, `timing`, `nonfinite` (an index into NONFINITE), `stacks` and `numerics`."""

    def enter_module(self, module: object, /) -> None:
        """Count the ops of this thread for a module, if a recorder knows it."""

    def leave_module(self, module: object, /) -> None:
        """Leave a module, and the modules inside it that were not left."""

    def note_recipe(self, recipe: str, declined: str, /) -> None:
        """Note that a recipe computed the op that this thread is in, or why it declined."""

    def note_uncounted(self, begins: bool, /) -> None:
        """Stop counting this thread's ops (True), or resume (False), while a compiler runs or a device is measured."""
