"""Running code that uses torch.autocast: ``patch_torch``, and ``polycast run``."""

from polycast.plugin import Plugin

plugin = Plugin(
    names={
        "patch_torch": "polycast_plugins.dropin.patch:patch_torch",
    },
    commands={"run": "polycast_plugins.dropin.run_command:app"},
    needs=["observe"],
)
