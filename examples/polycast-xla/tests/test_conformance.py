"""The conformance suite: on the device if it is available, otherwise on fake tensors."""

import polycast
from polycast_plugins.testing import BackendConformance


class TestXla(BackendConformance):
    backend = "xla"
    fake = not polycast.is_autocast_available("xla")
