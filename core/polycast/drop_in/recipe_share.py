"""Find how much of a program's matrix products a recipe computes, for the summary of ``polycast run --recipe``."""

import time
from collections.abc import Iterable

from ..observer.matmuls import matmul_lines
from ..observer.observe import observe_program

SECONDS = 10.0
"""How long a program is observed, so that one that runs for longer is not slowed for longer."""


class RecipeShare:
    """The matrix products of a program's first seconds, from :meth:`start` on.

    Raises:
        RuntimeError: on starting, the observer cannot be built.
    """

    def __init__(self) -> None:
        self._observers: list[observe_program] = []
        self._until = float("inf")
        self._is_cut_short = False

    def start(self) -> None:
        """Observe from now on."""
        observer = observe_program(threads="all")
        self._seen = observer.__enter__()
        self._observers.append(observer)
        self._until = time.monotonic() + SECONDS

    def note_region(self) -> None:
        """Observe no more, if it has been long enough; called as regions are entered."""
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
        """Observe no more, and return what was seen, for people."""
        self._stop()
        lines = list(matmul_lines(self._seen.matmuls))
        if lines and self._is_cut_short:
            lines[0] += f" of the first {SECONDS:.0f} s"
        return lines
