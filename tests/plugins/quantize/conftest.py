"""Fixtures for the kernels of the CPU's backend: instruction sets, and scales."""

import pytest
import torch

import polycast

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
NAMES = ("plain", "avx2", "avx_vnni", "vnni", "amx", "dotprod", "i8mm")
ISAS = torch.ops.polycast_cpu.isas() if AVAILABLE else [0]


@pytest.fixture(params=ISAS, ids=NAMES.__getitem__)
def isa(request):
    """Run a test on each set of instructions that the processor has."""
    return request.param


@pytest.fixture(params=["row", "tensor"])
def by_row(request):
    """Run a test with a scale for each row, and with one for all."""
    return request.param == "row"
