"""The arguments of ``tune``, checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..policy.recipe import Recipe
from ..region.autocast import autocast
from .numerics import relative_error
from .outcome import Loss, outcome_error

Metric = Callable[[Any, Any], Any]


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
