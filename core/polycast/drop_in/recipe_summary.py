"""Measure the share of a program that a recipe computed, for the summary of ``polycast run --recipe``."""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ..engine.low_bit.listeners import listeners
from ..observer.matmuls import matmul_lines
from ..observer.observe import observe_program

SECONDS = 10.0
"""Seconds for which a program is observed: observing slows it."""


class RecipeSummary:
    """The ops that a recipe computes or does not from now on, until the process ends."""

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self._ops: dict[tuple[str, str | None], Iterator[int]] = {}
        self.share: RecipeShare | None = None
        listeners.add(self._count)
        with suppress(RuntimeError):  # the observer cannot be built
            self.share = RecipeShare()

    def _count(self, device_type: str, recipe: str, op: str, reason: str | None) -> None:
        next(self._ops.setdefault((op.removeprefix("aten::"), reason), itertools.count()))

    def is_complete(self) -> bool:
        """Return whether the recipe computed all ops that it is for."""
        return all(reason is None for _, reason in self._ops)

    def text(self) -> str:
        """Return the summary: how many ops ran by the recipe, then a line for each reason why others did not.

        Call it once: it advances the counters.
        """
        counts = {key: next(counter) for key, counter in self._ops.items()}
        ran = sum(count for (_, reason), count in counts.items() if reason is None)
        others = sorted(
            ((key, count) for key, count in counts.items() if key[1] is not None), key=lambda item: -item[1]
        )
        lines = [f"{count} {op} in the fast dtype: {reason}" for (op, reason), count in others]
        if self.share is not None:
            lines += self.share.lines()
        return "\n  ".join([f"{self._recipe}: {ran} op{'s' * (ran != 1)}", *lines])


class RecipeShare:
    """The share that recipes have in the matrix products of a program's next seconds.

    Raises:
        RuntimeError: the observer cannot be built.
    """

    def __init__(self) -> None:
        observer = observe_program(threads="all")
        self._seen = observer.__enter__()
        self._observers = [observer]
        self._until = time.monotonic() + SECONDS
        self._is_cut_short = False

    def end_if_late(self) -> None:
        """Stop observing after :data:`SECONDS`; called as regions are entered."""
        if time.monotonic() >= self._until:
            self._is_cut_short |= self._stop()

    def _stop(self) -> bool:
        try:
            observer = self._observers.pop()  # by one thread only
        except IndexError:
            return False
        self._until = float("inf")
        observer.__exit__(None, None, None)
        return True

    def lines(self) -> Iterable[str]:
        """Stop observing, and return the share and the largest products outside of it."""
        self._stop()
        lines = list(matmul_lines(self._seen.matmuls))
        if lines and self._is_cut_short:
            lines[0] += f" of the first {SECONDS:.0f} s"
        return lines
