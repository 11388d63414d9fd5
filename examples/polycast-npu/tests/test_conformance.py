"""The conformance suite: on the device if it is available, otherwise on fake tensors."""

import polycast
from polycast_plugins.testing import BackendConformance


class TestNpu(BackendConformance):
    backend = "npu"
    fake = not polycast.is_autocast_available("npu")
