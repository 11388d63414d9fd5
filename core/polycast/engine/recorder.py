"""What is counted while somebody observes: the contract of observers and recorders, and what is read of one."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypedDict

import torch

_Dtypes: TypeAlias = Sequence[tuple[torch.dtype, int]]
_Casts: TypeAlias = Sequence[tuple[torch.dtype, torch.dtype, bool, int, int, int, int, int, int, float]]
"""(source, target, of a weight, count, bytes, hits, misses, recasts, their bytes, seconds)"""

_Sources: TypeAlias = Sequence[
    tuple[str | None, int, torch.dtype, torch.dtype | None, bool, torch.dtype | None, int, int, int, int]
]
"""(the op that made it, its module, dtype, what it was cast to, whether it is the op's first tensor, what it was
computed in where the program asked for its dtype, count, bytes, casts, their bytes)"""

NO_MODULE = -1


class Reading(TypedDict):
    """What was counted so far. Modules have the numbers that they were added with; overrides, a number for each."""

    counts: Sequence[
        tuple[
            str,  # the op
            bool,  # in the backward pass
            int,  # the module
            str | None,  # the device whose autocast looked
            torch.dtype | None,  # its fast dtype
            int,  # the override; 0: none
            int,  # calls
            int,  # those of them inside other ops
            _Dtypes,  # of the inputs
            _Dtypes,  # that it computed in
            _Dtypes,  # of the outputs
            Sequence[tuple[torch.dtype | None, float]],  # seconds, by what it computed in; of calls in no other op
            _Casts,
            Sequence[str] | None,  # the stack of the first call
            _Sources,
        ]
    ]
    entries: Sequence[tuple[int, int]]
    """(module, how often it was called)"""
    chains: Sequence[tuple[int, Sequence[str], int, int, str | None, torch.dtype | None, int, int, int, int]]
    """(kind, ops, override, module, device, fast dtype, module of the last op, count, bytes, casts); see CHAIN_KINDS"""
    matmuls: Sequence[tuple[str, bool, int, str | None, torch.dtype | None, int, str | None, str | None, int, float]]
    """(op, in the backward pass, module, device, fast dtype, override, recipe, why it declined, calls, operations); no
    recipe where none was asked; an empty reason where it computed them"""
    regions: Sequence[tuple[str, str, bool, torch.dtype, int, int, int, int]]
    """(where, device, enabled, dtype, entries, unused, ops, calls of compiled code)"""
    compiled: Sequence[tuple[str, int, int]]
    """(region, module, calls)"""
    overrides: dict[int, tuple[Any, ...]]
    """By number, the override first."""
    nonfinite: tuple[str, bool, int, bool, bool, torch.dtype, Sequence[str] | None, int] | None
    """(op, in the backward pass, module, inf, nan, dtype, stack, how often)"""


CHAIN_KINDS = ("round_trip", "float32_by_one_input", "unlisted_float32_op", "loss", "loss_root")
"""The kinds of chains, by their numbers: those of findings, and what a loss in the fast dtype is found by."""

NONFINITE = ("ignore", "record", "raise")
"""What becomes of inf and nan, by number."""


class Observer(Protocol):
    """What sees an engine at work, once somebody wants to know."""

    def recorder(self, all_threads: bool, timing: bool, nonfinite: int, stacks: bool, /) -> "Recorder":
        """Return a recorder that is to be started; `nonfinite` is a number of :data:`NONFINITE`."""

    def enter_module(self, module: object, /) -> None:
        """Have the ops on this thread counted for a module, if a recorder knows it."""

    def leave_module(self, module: object, /) -> None:
        """Have them counted no more for it, nor for those inside it that were not left."""

    def note_low_bit(self, recipe: str, declined: str, /) -> None:
        """Note whether a recipe computed the op that this thread is in; `declined` says why not, or is empty."""

    def note_compiling(self, begins: bool, /) -> None:
        """Have the ops on this thread not counted: they are a compiler's, until it is done."""


class Recorder(Protocol):
    """One observation."""

    def start(self) -> None:
        """Count from now on, on this thread or on all."""

    def stop(self) -> None:
        """Count no more; on any thread."""

    def read(self) -> Reading:
        """Return what was counted so far."""

    def nonfinite_count(self) -> int:
        """Return how many ops turned finite inputs into others so far."""

    def add_module(self, address: int, number: int, /) -> None:
        """Know a module, by its ``id``."""

    def forget_module(self, address: int, /) -> None:
        """Know it no more: it has died."""

    def add_parameter(self, parameter: torch.Tensor, module: int, /) -> None:
        """Know which module a parameter is of."""
