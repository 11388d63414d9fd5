from polycast.plugin import Plugin

from .conformance import BackendConformance as BackendConformance
from .samples import Maker as Maker
from .samples import Sample as Sample
from .torch_policies import policies_of_torch as policies_of_torch

plugin: Plugin
