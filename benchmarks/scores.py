"""How good a model is."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scores:
    """How good a model is, by the way in which it is computed; `kept` are the modules under a rule ``"none"``.

    `skipped` is why it could not be measured here.
    """

    what: str
    metric: str
    kept: str
    by: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
