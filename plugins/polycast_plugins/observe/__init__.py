"""Observe which ops run in which dtype and why, at what cost, and what to do about it.

``polycast`` has what users call: ``observe``, ``RunLog``, ``RunHistory``, ``grad_scaler``. This package has the types
of the results.
"""

from polycast.plugin import Plugin, lazy_names

plugin = Plugin(
    names={
        "RunHistory": "polycast_plugins.observe.run_history:RunHistory",
        "RunLog": "polycast_plugins.observe.run_log:RunLog",
        "grad_scaler": "polycast_plugins.observe.grad_scaler:grad_scaler",
        "observe": "polycast_plugins.observe.observer:observe",
    },
    libraries=["polycast_plugins.observe.observer_library:OBSERVER"],
)

__getattr__, __dir__, __all__ = lazy_names(__name__)
