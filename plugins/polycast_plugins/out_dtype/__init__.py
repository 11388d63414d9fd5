"""``polycast.out_dtype``: run an op with its result in another dtype than its inputs."""

from polycast.plugin import Plugin

plugin = Plugin(names={"out_dtype": "polycast_plugins.out_dtype.operator:out_dtype"})
