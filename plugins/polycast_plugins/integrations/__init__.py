"""polycast in Lightning, transformers and Accelerate; each module imports only its own library."""

from polycast.plugin import Plugin

plugin = Plugin(needs=("observe",))
