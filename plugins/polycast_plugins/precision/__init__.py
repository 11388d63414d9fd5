"""Errors of a region by module, the modules or ops that must stay in float32, and what a region does to a model."""

from typing import TYPE_CHECKING

from polycast.plugin import Plugin, lazy_names

if TYPE_CHECKING:
    from .comparison import Comparison as Comparison
    from .comparison import GradientErrors as GradientErrors
    from .comparison import ModuleErrors as ModuleErrors
    from .evidence import Evidence as Evidence
    from .evidence import Holdout as Holdout
    from .evidence import Tuned as Tuned
    from .measured import Outcome as Outcome
    from .minimal_set import Choice as Choice
    from .minimal_set import Trial as Trial
    from .model_explanation import ModelExplanation as ModelExplanation
    from .model_explanation import ModuleExplanation as ModuleExplanation
    from .timing import Timings as Timings
    from .values import Error as Error

_PLACES = {
    "Choice": "minimal_set",
    "Comparison": "comparison",
    "Error": "values",
    "Evidence": "evidence",
    "GradientErrors": "comparison",
    "Holdout": "evidence",
    "ModelExplanation": "model_explanation",
    "ModuleErrors": "comparison",
    "ModuleExplanation": "model_explanation",
    "Outcome": "measured",
    "Timings": "timing",
    "Trial": "minimal_set",
    "Tuned": "evidence",
}
"""The module of each type of results."""

__all__ = [*_PLACES]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy_names(__name__, _PLACES)

plugin = Plugin(
    names={
        "Reference": "polycast_plugins.precision.comparison:Reference",
        "compare": "polycast_plugins.precision.compare:compare",
        "equalize": "polycast_plugins.precision.equalize:equalize",
        "explain": "polycast_plugins.precision.explain:explain",
        "tune": "polycast_plugins.precision.tune:tune",
    },
    commands={
        "explain": "polycast_plugins.precision.explain_command:run",
        "tune": "polycast_plugins.precision.tune_command:run",
    },
    needs=["fastest", "observe", "quantize"],
)
