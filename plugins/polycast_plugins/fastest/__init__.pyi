from polycast.plugin import Plugin

from .profiled_ops import OpSeconds as OpSeconds
from .profiled_ops import op_seconds as op_seconds

plugin: Plugin
