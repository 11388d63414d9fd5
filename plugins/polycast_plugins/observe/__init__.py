"""Observe which ops run in which dtype and why, at what cost, and what to do about it."""

from polycast.plugin import Plugin

plugin = Plugin(
    names={
        "Observation": "polycast_plugins.observe.observation:Observation",
        "RunHistory": "polycast_plugins.observe.run_history:RunHistory",
        "RunLog": "polycast_plugins.observe.run_log:RunLog",
        "observe": "polycast_plugins.observe.observe:observe",
    }
)
