from polycast.plugin import Plugin

from .estimates import OpSeconds as OpSeconds
from .estimates import op_seconds as op_seconds

plugin: Plugin
