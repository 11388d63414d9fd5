"""Errors of a region by module, the modules or ops that must stay in float32, and what a region does to a model."""

from polycast.plugin import Plugin, lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

plugin = Plugin(
    names={
        "Reference": "polycast_plugins.precision.compare:Reference",
        "compare": "polycast_plugins.precision.compare:compare",
        "calibrate": "polycast_plugins.precision.calibrate:calibrate",
        "explain": "polycast_plugins.precision.explain:explain",
        "tune": "polycast_plugins.precision.tune:tune",
    },
    commands={
        "explain": "polycast_plugins.precision.model_command:run_explain",
        "tune": "polycast_plugins.precision.model_command:run_tune",
    },
    needs=["fastest", "observe", "quantize"],
)
