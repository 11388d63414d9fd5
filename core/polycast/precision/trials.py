"""The evaluations of a search, each made once, within a budget."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..policy.plain_data import plain_data
from .minimal_set import Choice, Members, OutOfBudget


@dataclass(frozen=True)
class Trial:
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
        plain = plain_data(vars(self))
        return {key: value for key, value in plain.items() if value or key in ("members", "distance")}


class Trials:
    """Evaluates choices, each once, within the budget."""

    def __init__(self, evaluate: Callable[[Choice], Trial], budget: int) -> None:
        self.made: dict[Choice, Trial] = {}
        self._evaluate, self._budget = evaluate, budget

    def of(self, choice: Choice) -> Trial:
        """Return the trial of a choice.

        Raises:
            OutOfBudget: it was not evaluated yet, and the budget is spent.
        """
        if choice not in self.made:
            if len(self.made) >= self._budget:
                raise OutOfBudget
            self.made[choice] = self._evaluate(choice)
        return self.made[choice]

    def closest(self) -> Trial:
        """Return the trial with the smallest distance, or of several the one with the fewest members."""
        return min(self.made.values(), key=lambda trial: (trial.distance, len(trial.members), len(trial.kept)))


def distance_of(value: object) -> float:
    """Return the result of a metric as a number; nan becomes inf.

    Raises:
        TypeError: it is not a number.
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"metric must return a number, the distance of the output from the reference; got {type(value).__name__}"
        ) from error
    return number if math.isfinite(number) else math.inf
