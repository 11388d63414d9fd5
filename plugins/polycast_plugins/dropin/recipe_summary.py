"""Count what a recipe computes in a program, for the summary of ``polycast run --recipe``."""

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from polycast.plugin import events
from polycast_plugins.observe import Observation, matmul_lines, observe_program

SECONDS = 10.0
"""Seconds for which a program is observed: observing slows it."""


class RecipeSummary:
    """The ops that a recipe computes or does not in a program's next seconds, and its share of the matmuls."""

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self._ops: dict[tuple[str, str, str | None], Iterator[int]] = {}
        self._seen: Observation | None = None
        self._was_cut_short = False
        started = ExitStack()
        events.recipe_call.add(self._count)
        started.callback(events.recipe_call.remove, self._count)
        with suppress(RuntimeError):  # the observer cannot be built
            self._seen = started.enter_context(observe_program(threads="all"))
        self._started = [started]
        self._until = time.monotonic() + SECONDS

    def _count(self, device_type: str, recipe: str, op: str, reason: str | None, package: str) -> None:
        next(self._ops.setdefault((recipe, op.removeprefix("aten::"), reason), itertools.count()))

    def end_if_late(self) -> None:
        """Stop counting after :data:`SECONDS`; called as regions are entered."""
        if time.monotonic() >= self._until:
            self._was_cut_short |= self._stop()

    def _stop(self) -> bool:
        try:
            started = self._started.pop()  # by one thread only
        except IndexError:
            return False
        self._until = float("inf")
        started.close()
        return True

    def is_complete(self) -> bool:
        """Return whether the recipe computed all ops that it is for."""
        return all(reason is None for _, _, reason in self._ops)

    def text(self) -> str:
        """Stop counting, and return the summary: the ops that the recipe computed, and why it did not compute others.

        Call it once, at the end: reading a counter advances it.
        """
        self._stop()
        counts = {key: next(counter) for key, counter in self._ops.items()}
        ran = sum(count for (_, _, reason), count in counts.items() if reason is None)
        lines = [
            f"{count} {op} {self._how(recipe) if reason is None else f'in the fast dtype: {reason}'}"
            for (recipe, op, reason), count in sorted(counts.items(), key=lambda item: -item[1])
            if reason is not None or recipe != self._recipe
        ]
        if self._seen is not None:
            lines += matmul_lines(self._seen.matmuls)
        first = f" in the first {SECONDS:.0f} s" if self._was_cut_short else ""
        return "\n  ".join([f"{self._recipe}: {ran} op{'s' * (ran != 1)}{first}", *lines])

    def _how(self, recipe: str) -> str:
        """Return how a recipe computed an op: its way, as in ``"fastest:float32"``, or its name if it is another."""
        return f"by {recipe.removeprefix(f'{self._recipe}:')}"
