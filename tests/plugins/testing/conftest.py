"""Fixtures that run a check of the conformance suite."""

import inspect

import pytest
import torch

import polycast
from polycast.plugin import Availability
from polycast_backends.cpu import CpuBackend
from polycast_plugins.testing import BackendConformance, recipe_checks


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
            polycast.plugin.unregister_backend("cpu")

    return check


@pytest.fixture
def check_kernel(check, monkeypatch):
    """Return a function that runs one check of the suite on a backend for the CPU that has a kernel."""
    monkeypatch.setattr(recipe_checks, "_SIZES", [(5, 32, 16)])

    def check_kernel(name, kernel, recipe="int8", op="aten::linear", **answers):
        class Wrong(CpuBackend):
            def recipe_availability(self, recipe):
                offered = recipe.short == "int8"
                return answers.get("availability", Availability(offered, "" if offered else "there is int8 only"))

            def low_bit_kernels(self, recipe):
                return answers.get("kernels", {op: kernel})

        takes_recipe = "recipe" in inspect.signature(getattr(BackendConformance, name)).parameters
        check(name, Wrong(), *[recipe] * takes_recipe)

    return check_kernel
