"""The manifest of the plugin."""

from polycast.plugin import Plugin

_HERE = "polycast_plugins.quantize"
_RECIPES = f"{_HERE}.low_bit_recipes"

plugin = Plugin(
    names={
        "Calibration": f"{_HERE}.calibration:Calibration",
        "map_weights": f"{_HERE}.map_weights:map_weights",
        **{name: f"{_RECIPES}:{name}" for name in ("Float8", "Int4", "Int8")},
    },
    methods={"WeightCache.load": f"{_HERE}.loading:load", "WeightCache.save": f"{_HERE}.saving:save"},
    recipes={name.lower(): f"{_RECIPES}:{name}" for name in ("Float8", "Int4", "Int8")},
)
