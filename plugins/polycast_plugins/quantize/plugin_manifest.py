"""The manifest of the plugin."""

from polycast.plugin import Plugin

_RECIPES = "polycast_plugins.quantize.low_bit_recipes"

plugin = Plugin(
    names={name: f"{_RECIPES}:{name}" for name in ("Float8", "Int4", "Int8")},
    recipes={name.lower(): f"{_RECIPES}:{name}" for name in ("Float8", "Int4", "Int8")},
)
