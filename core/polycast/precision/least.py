"""The least that has to be in other numbers than the region's, in the order of what may be done about it.

What the fast dtype is not enough for is found first, with everything in the fast dtype; then, where the region has a
recipe, what has to leave it besides.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

from .choice import PLAIN, Choice
from .search import Members, OutOfBudget, smallest_set


class Least(NamedTuple):
    """What was found, and whether it is known that no single member of it can have less."""

    choice: Choice
    is_minimal: bool


class Ordered:
    """What there is to choose from, in order.

    Args:
        order: all of them, first those that are the most likely to be needed.
        leaves: those that can leave the recipe for the fast dtype; none where there is no recipe.
    """

    def __init__(self, order: Sequence[str], leaves: Callable[[str], bool]) -> None:
        self.order = tuple(order)
        self._leaves = leaves

    def choice(self, members: Container[str], kept: Container[str]) -> Choice:
        """Return the choice that has some in float32 and some in the fast dtype."""
        in_float32, fast = (tuple(name for name in self.order if name in some) for some in (members, kept))
        return Choice(in_float32, fast)

    def all_fast(self, members: Members = ()) -> Choice:
        """Return the choice that has some in float32, and as much as can be of the others in the fast dtype."""
        return self.choice(members, [name for name in self.order if name not in members and self._leaves(name)])

    def with_one_less(self, choice: Choice) -> Iterator[Choice]:
        """Yield a choice with one of those that are in float32 in the fast dtype, for each of them."""
        for name in filter(self._leaves, reversed(choice.members)):
            yield self.choice([each for each in choice.members if each != name], (*choice.kept, name))


def least(ordered: Ordered, is_enough: Callable[[Choice], bool]) -> Least | None:
    """Return a choice that is enough, with as little out of the region's numbers as was found; None if none is.

    Args:
        ordered: what there is to choose from.
        is_enough: says whether a choice is enough. It may raise OutOfBudget; not for :data:`PLAIN` and for everything
            in float32.
    """
    if is_enough(PLAIN):
        return Least(PLAIN, True)
    in_float32 = smallest_set(ordered.order, lambda members: is_enough(ordered.all_fast(members)))
    if in_float32 is None:
        return None
    found = Least(ordered.all_fast(in_float32.members), in_float32.is_minimal)
    while found.choice.kept:
        kept = _least_kept(found, is_enough)
        if not kept.is_minimal:
            return kept
        # What is in float32 was found with everything else in the fast dtype. Now there is less in that.
        try:
            fewer = next(filter(is_enough, ordered.with_one_less(kept.choice)), None)
        except OutOfBudget:
            return Least(kept.choice, False)
        if fewer is None:
            return kept
        found = Least(fewer, found.is_minimal)
    return found


def _least_kept(found: Least, is_enough: Callable[[Choice], bool]) -> Least:
    """Return what was found with as little in the fast dtype as is enough, and the same in float32."""
    members, kept = found.choice
    smallest = smallest_set(kept, lambda some: is_enough(Choice(members, some)))
    if smallest is None:  # the budget was spent at the first question
        return Least(found.choice, False)
    return Least(Choice(members, smallest.members), found.is_minimal and smallest.is_minimal)
