"""A fixture that runs a check of the conformance suite."""

import inspect

import pytest
import torch

import polycast
from polycast_plugins.testing import BackendConformance


@pytest.fixture
def check():
    """Return a function that runs one check of the suite on a backend for the CPU."""

    def check(name, wrong, *arguments, **attributes):
        polycast.plugin.register_backend(wrong)
        suite = type("TestWrong", (BackendConformance,), {"backend": "cpu", **attributes})()
        method = getattr(suite, name)
        try:
            if "device" in inspect.signature(method).parameters:
                with suite.opened() as device:
                    return method(device, *arguments)
            return method(*arguments)
        finally:
            torch.set_autocast_enabled("cpu", False)

    return check
