"""``compare`` and ``tune``: the errors of a region by module, and the modules or ops that must stay in float32."""

from polycast.plugin import Plugin

plugin = Plugin(
    names={
        "Comparison": "polycast_plugins.precision.comparison:Comparison",
        "Evidence": "polycast_plugins.precision.evidence:Evidence",
        "ModelExplanation": "polycast_plugins.precision.model_explanation:ModelExplanation",
        "ModuleExplanation": "polycast_plugins.precision.model_explanation:ModuleExplanation",
        "Reference": "polycast_plugins.precision.comparison:Reference",
        "Tuned": "polycast_plugins.precision.evidence:Tuned",
        "compare": "polycast_plugins.precision.compare:compare",
        "equalize": "polycast_plugins.precision.equalize:equalize",
        "explain": "polycast_plugins.precision.explain:explain",
        "tune": "polycast_plugins.precision.tune:tune",
    },
    commands={
        "explain": "polycast_plugins.precision.explain_command:run",
        "tune": "polycast_plugins.precision.tune_command:run",
    },
    needs=["observe"],
)
