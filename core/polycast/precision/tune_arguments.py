"""The arguments of ``tune``, checked."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..policy.recipe import Recipe
from ..region.autocast import autocast
from .numerics import relative_error
from .outcome import Loss, outcome_error

Metric = Callable[[Any, Any], Any]

_CHOICES = {"over": ("modules", "ops"), "objective": ("accuracy", "time"), "reduction": ("worst", "mean")}
MIN_BUDGET = 2
"""The region without a policy, and everything in float32; with a recipe, also everything in the fast dtype."""


@dataclass(frozen=True)
class TuneArguments:
    """The arguments of ``tune``, apart from the model and its data.

    Attributes:
        metric: the metric; None for the relative L2 error.
        metric_name: its name.
        region: the region, with the recipe if there is one.
        tolerance, over, objective, recipe, loss, reduction, margin, exclude, candidates: as given.
    """

    metric: Metric | None
    metric_name: str
    region: autocast
    tolerance: float
    over: str
    objective: str
    recipe: Recipe | None
    loss: Loss | None = None
    reduction: str = "worst"
    margin: float = 0.0
    exclude: tuple[str, ...] = ()
    candidates: tuple[str, ...] | None = None

    @property
    def aim(self) -> float:
        """The distance that the search aims at: the tolerance without the margin."""
        return self.tolerance * (1.0 - self.margin)

    def distance(self, output: Any, reference: Any) -> object:
        """Return the distance of an output or an outcome from float32's, as the metric returns it."""
        if self.metric is not None:
            return self.metric(output, reference)
        return relative_error(output, reference) if self.loss is None else outcome_error(output, reference)

    def reduced(self, distances: list[float]) -> float:
        """Return the distance over several batches."""
        return max(distances) if self.reduction == "worst" else math.fsum(distances) / len(distances)


def check_arguments(metric: object, tolerance: object, margin: object, budget: object, min_budget: int) -> None:
    """Raise TypeError or ValueError for an invalid argument."""
    if metric is not None and not callable(metric):
        raise TypeError(f"metric must be a function of an output and a reference, or None; got {metric!r}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f"tolerance must be a number that is not negative, got {tolerance!r}")
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < 1:
        raise ValueError(f"margin must be a share of the tolerance, at least 0 and below 1; got {margin!r}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < min_budget):
        runs = "the region without a policy, and everything in float32"
        if min_budget > MIN_BUDGET:
            runs += ", and in the fast dtype"
        raise ValueError(f"budget must be a number of evaluations, at least {min_budget} ({runs}); got {budget!r}")


def check_choices(**values: str) -> None:
    """Raise ValueError for an argument that is not one of its choices."""
    for what, value in values.items():
        if value not in _CHOICES[what]:
            raise ValueError(f"{what} must be {' or '.join(map(repr, _CHOICES[what]))}, got {value!r}")


def globs_of(value: object, argument: str) -> tuple[str, ...]:
    """Return globs as a tuple; one alone may be a string.

    Raises:
        TypeError: they are not strings.
    """
    is_one = isinstance(value, str)
    globs = tuple(value) if isinstance(value, Iterable) and not is_one else (value,)
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{argument} must be a list of globs, such as ['layers.0', 'lm_head']; got {value!r}")
    return globs


def nothing_to_choose(candidates: Iterable[str] | None) -> ValueError:
    """Return the error for a search without candidates."""
    is_empty = candidates is not None and not tuple(candidates)
    why = "candidates= is empty" if is_empty else "exclude= matches all candidates"
    remedy = "Name some, or leave it out" if is_empty else "Leave some of it out"
    return ValueError(f"there is nothing to choose from: {why}. {remedy}.")
