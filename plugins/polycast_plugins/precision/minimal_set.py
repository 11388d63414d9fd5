"""Find a minimal set of modules or ops that must not compute in the region's own precision, by group bisection.

The search assumes nothing about the evaluations, and makes each once, within a budget. What it returns has been
evaluated, as a whole and with each member taken out. Where larger sets are never worse and the `k` necessary members
are among the first `p`, it takes about `2 log(p) + 2 k log(p)` evaluations.
"""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from polycast.plugin import Result

Members: TypeAlias = tuple[str, ...]


class OutOfBudget(Exception):
    """Raised instead of an evaluation that exceeds the budget."""


class Choice(NamedTuple):
    """The candidates that do not compute in the region's own precision, each tuple in the order of the candidates.

    Attributes:
        members: the candidates in float32.
        in_fast_dtype: with a recipe, the candidates that leave it for the fast dtype.
    """

    members: Members = ()
    in_fast_dtype: Members = ()


NO_POLICY = Choice()
"""The region without a policy."""


class MinimalSet(NamedTuple):
    """A sufficient set, and whether it is known that no single member can be taken out."""

    members: Members
    is_minimal: bool


class MinimalChoice(NamedTuple):
    """A sufficient choice, and whether it is known that no single member can be moved back."""

    choice: Choice
    is_minimal: bool


def minimal_set(order: Sequence[str], is_enough: Callable[[Members], bool]) -> MinimalSet | None:
    """Return a sufficient set, as small as was found, or None if even the full set is not sufficient.

    The most likely members come first. `is_enough` may raise OutOfBudget.
    """
    everything = tuple(order)
    try:
        if is_enough(()):
            return MinimalSet((), True)
        if not is_enough(everything):
            return None
    except OutOfBudget:
        return None
    search = _Search(everything, is_enough)
    try:
        search.find_prefix()
        search.take_out()
    except OutOfBudget:
        return MinimalSet(search.best, False)
    return MinimalSet(search.best, True)


class _Search:
    def __init__(self, best: Members, is_enough: Callable[[Members], bool]) -> None:
        self.best = best
        self._is_enough = is_enough

    def find_prefix(self) -> None:
        """Find the length of a sufficient prefix: double it until it suffices, then bisect."""
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
        """Take out unnecessary members, the least likely first, in ever smaller groups, at last one by one."""
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


class CandidateOrder:
    """All candidates of a search, the most likely members first, and whether each can leave a recipe."""

    def __init__(self, names: Sequence[str], can_leave_recipe: Callable[[str], bool]) -> None:
        self.names = tuple(names)
        self._can_leave_recipe = can_leave_recipe

    def choice(self, members: Container[str], in_fast_dtype: Container[str]) -> Choice:
        """Return a choice with its candidates in order."""
        in_float32, fast = (tuple(name for name in self.names if name in some) for some in (members, in_fast_dtype))
        return Choice(in_float32, fast)

    def all_fast(self, members: Members = ()) -> Choice:
        """Return the choice with some candidates in float32, and all others that can be in the fast dtype."""
        others = [name for name in self.names if name not in members and self._can_leave_recipe(name)]
        return self.choice(members, others)

    def one_less_in_float32(self, choice: Choice) -> Iterator[Choice]:
        """Yield the choices with one member moved from float32 to the fast dtype."""
        for name in filter(self._can_leave_recipe, reversed(choice.members)):
            yield self.choice([each for each in choice.members if each != name], (*choice.in_fast_dtype, name))


def minimal_choice(order: CandidateOrder, is_enough: Callable[[Choice], bool]) -> MinimalChoice | None:
    """Return a sufficient choice with as few candidates out of the region's own precision as was found, or None.

    First the members that need float32 are found, with all other candidates in the fast dtype; then, if the region has
    a recipe, the candidates that must leave it for the fast dtype. `is_enough` may raise OutOfBudget, except for
    :data:`NO_POLICY` and for everything in float32.
    """
    if is_enough(NO_POLICY):
        return MinimalChoice(NO_POLICY, True)
    in_float32 = minimal_set(order.names, lambda members: is_enough(order.all_fast(members)))
    if in_float32 is None:
        return None
    found = MinimalChoice(order.all_fast(in_float32.members), in_float32.is_minimal)
    while found.choice.in_fast_dtype:
        found = _minimize_in_fast_dtype(found, is_enough)
        if not found.is_minimal:
            return found
        # The members in float32 were found with everything else in the fast dtype, which now has fewer candidates.
        try:
            fewer = next(filter(is_enough, order.one_less_in_float32(found.choice)), None)
        except OutOfBudget:
            return MinimalChoice(found.choice, False)
        if fewer is None:
            return found
        found = MinimalChoice(fewer, True)
    return found


def _minimize_in_fast_dtype(found: MinimalChoice, is_enough: Callable[[Choice], bool]) -> MinimalChoice:
    members, in_fast_dtype = found.choice
    smallest = minimal_set(in_fast_dtype, lambda some: is_enough(Choice(members, some)))
    if smallest is None:  # out of budget at the first evaluation
        return MinimalChoice(found.choice, False)
    return MinimalChoice(Choice(members, smallest.members), found.is_minimal and smallest.is_minimal)


@dataclass(frozen=True)
class Trial(Result):
    """One evaluation.

    Attributes:
        members: the modules, or ops, in float32.
        distance: the distance of the output from float32's; inf if it was not finite, or there was no output.
        error: the exception of the model; empty if it ran.
        kept: with a recipe, the modules, or ops, that left it for the fast dtype.
        distances: with several batches, the distance for each; `distance` is the worst, or the mean.
    """

    members: Members
    distance: float
    error: str = ""
    kept: Members = ()
    distances: tuple[float, ...] = ()

    @property
    def choice(self) -> Choice:
        """The choice that was evaluated."""
        return Choice(self.members, self.kept)

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as plain data."""
        plain = super().to_dict()
        return {key: value for key, value in plain.items() if value or key in ("members", "distance")}


class Trials:
    """Evaluates choices, each once, within the budget."""

    def __init__(self, evaluate: Callable[[Choice], Trial], budget: int) -> None:
        self.made: dict[Choice, Trial] = {}
        self._evaluate, self._budget = evaluate, budget

    def of(self, choice: Choice) -> Trial:
        """Return the trial of a choice; raise OutOfBudget if it is not made yet, and the budget is spent."""
        if choice not in self.made:
            if len(self.made) >= self._budget:
                raise OutOfBudget
            self.made[choice] = self._evaluate(choice)
        return self.made[choice]

    def closest(self) -> Trial:
        """Return the trial with the smallest distance, or of several the one with the fewest members."""
        return min(self.made.values(), key=lambda trial: (trial.distance, len(trial.members), len(trial.kept)))


def distance_of(value: object) -> float:
    """Return the result of a metric as a number; nan becomes inf."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"metric must return a number, the distance of the output from the reference; got {type(value).__name__}"
        ) from error
    return number if math.isfinite(number) else math.inf
