"""The accuracy of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scores:
    """The accuracy of a model in several precisions.

    Attributes:
        what, metric: the model, and the measure.
        kept: the modules under a rule ``"none"``.
        by: the measured values, by precision.
        skipped: the reason why nothing was measured.
        note: what the values leave out.
    """

    what: str
    metric: str
    kept: str
    by: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
    note: str = ""
