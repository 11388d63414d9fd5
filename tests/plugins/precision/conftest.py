"""A CPU backend that computes recipes in Python and races that take no time: results do not depend on the processor."""

import weakref

import pytest
import torch
import torch.nn.functional as F

import polycast
from polycast_backends.cpu import CpuBackend
from polycast_plugins.precision import values
from polycast_plugins.precision.timing import Race


def quantized(values, dim):
    """Return values rounded to 255 levels, with a scale for each row along a dimension, or one for all."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = largest.clamp(min=1e-30) / 127
    return (values / scale).round() * scale


class Linear(polycast.plugin.LowBitKernel):
    """A linear with int8's rounding, computed in float32."""

    def __init__(self, scales):
        self.dim = -1 if scales == "row" else None

    def prepack(self, weight):
        return (quantized(weight.float(), 1),)

    def run(self, prepared, x, weight, bias):
        product = F.linear(quantized(x.float(), self.dim), prepared[0], None if bias is None else bias.float())
        return product.to(torch.get_autocast_dtype("cpu"))


class PythonCpu(CpuBackend):
    def recipe_availability(self, recipe):
        if recipe.kind == "int8":
            return polycast.plugin.Availability(True)
        return polycast.plugin.Availability(False, "there is int8 only")

    def low_bit_kernels(self, recipe):
        return {"aten::linear": Linear(recipe.scales)}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def int8_in_python():
    """Register a backend for the CPU whose recipes are computed in Python."""
    polycast.plugin.register_backend(PythonCpu())


@pytest.fixture
def alive(monkeypatch):
    """Return a set for tensors, and a list of how many of them are alive when outputs are compared."""
    tensors, counts = weakref.WeakSet(), []
    measured = values.Sums.of.__func__

    def of(cls, reference, other):
        counts.append(len(tensors))
        return measured(cls, reference, other)

    monkeypatch.setattr(values.Sums, "of", classmethod(of))
    return tensors, counts


@pytest.fixture
def quick(monkeypatch):
    """Replace races by ones that take no time, in which the given side is the fastest."""

    def quick(faster):
        def run(self, advance=None):
            self.rounds = [{side: 1.0 if side == faster else 2.0 for side in self.sides}]
            return self

        monkeypatch.setattr(Race, "run", run)

    return quick
