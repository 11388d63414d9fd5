"""The smallest part of many that is enough: by group bisection, with a bounded number of questions.

Nothing is taken for granted of the answers: what is found has been asked about, as a whole and with each member taken
out. How many questions that takes depends on the answers: where more never is worse and the `k` members that are needed
are among the first `p`, some `2 log(p) + 2 k log(p)`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

Members: TypeAlias = tuple[str, ...]


class OutOfBudget(Exception):
    """Raised by a question that may not be asked any more."""


class Smallest(NamedTuple):
    """What was found: a set that is enough, and whether it is known that no single member can be taken out."""

    members: Members
    is_minimal: bool


def smallest_set(order: Sequence[str], is_enough: Callable[[Members], bool]) -> Smallest | None:
    """Return a set that is enough, as small as was found, or None if not even all are.

    Args:
        order: all there are, first those that are the most likely to be needed.
        is_enough: says whether some, in that order, are enough. It may raise OutOfBudget.
    """
    everything = tuple(order)
    try:
        if is_enough(()):
            return Smallest((), True)
        if not is_enough(everything):
            return None
    except OutOfBudget:
        return None
    search = _Search(everything, is_enough)
    try:
        search.find_prefix()
        search.take_out()
    except OutOfBudget:
        return Smallest(search.best, False)
    return Smallest(search.best, True)


class _Search:
    def __init__(self, best: Members, is_enough: Callable[[Members], bool]) -> None:
        self.best = best
        self._is_enough = is_enough

    def find_prefix(self) -> None:
        """Find how many of the first are enough: double the number until they are, then bisect."""
        everything, too_few, enough = self.best, 0, 1
        while enough < len(everything) and not self._try(everything[:enough]):
            too_few, enough = enough, 2 * enough
        enough = min(enough, len(everything))
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self._try(everything[:middle]):
                enough = middle
            else:
                too_few = middle

    def take_out(self) -> None:
        """Take out what is not needed, in groups that get smaller, the least likely first; at last one by one."""
        size = len(self.best)
        while size:
            size = -(-size // 2)
            taken = self._take_out_groups(size)
            if size == 1 and not taken:
                return

    def _take_out_groups(self, size: int) -> bool:
        taken, end = False, len(self.best)
        while end > 0:
            start = max(0, end - size)
            taken |= self._try(self.best[:start] + self.best[end:])
            end = start
        return taken

    def _try(self, members: Members) -> bool:
        if not self._is_enough(members):
            return False
        self.best = members
        return True
