"""Choose the fastest way to compute an op, by a device's profile, for the recipe `Fastest`."""

from ...policy.manifests import Plugin

plugin = Plugin(
    recipes={"fastest": "polycast.engine.fastest.fastest_recipe:Fastest"},
    vetoes=("polycast.engine.fastest.slower:slower_reason",),
)
