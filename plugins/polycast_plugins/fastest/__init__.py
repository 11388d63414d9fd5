"""The recipe "fastest", which computes each op the fastest way, by a profile of what is fast on the device."""

from polycast.plugin import Plugin, lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

plugin = Plugin(
    names={
        "DeviceProfile": "polycast_plugins.fastest.device_profile:DeviceProfile",
        "Fastest": "polycast_plugins.fastest.fastest_recipe:Fastest",
        "find_profile": "polycast_plugins.fastest.profile:find_profile",
        "profile": "polycast_plugins.fastest.profile:profile",
    },
    recipes={"fastest": "polycast_plugins.fastest.fastest_recipe:Fastest"},
    commands={"profile": "polycast_plugins.fastest.profile_command:run"},
    doctor={"profiles": "polycast_plugins.fastest.profile_command:describe"},
    devices={"profile": "polycast_plugins.fastest.profile_command:summary"},
    vetoes=("polycast_plugins.fastest.estimates:slower_reason",),
    libraries=("polycast_plugins.fastest.attention:OPS",),
    slow_reasons=("polycast_plugins.fastest.estimates:slow_reason",),
)
