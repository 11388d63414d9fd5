"""Fixtures for kernels: instruction sets, scales, and kernels in Python; and for saved caches."""

import functools

import pytest
import torch
from tests.core.conftest import define  # noqa: F401  # a fixture
from tests.core.engine.conftest import double_unseen, registered  # noqa: F401  # fixtures

import polycast

from .int8_linears import run

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
NAMES = ("plain", "avx2", "avx_vnni", "vnni", "amx", "dotprod", "i8mm")
ISAS = torch.ops.polycast_cpu.isas() if AVAILABLE else [0]


@pytest.fixture(params=ISAS, ids=NAMES.__getitem__)
def isa(request):
    return request.param


@pytest.fixture(params=["row", "tensor"])
def by_row(request):
    return request.param == "row"


@pytest.fixture
def int8_operators(int8_kernels):
    """Let the kernels compute by operators, which the native engine calls itself; return them."""
    library = torch.library.Library("polycast_test_int8", "FRAGMENT")
    for name, kernel in int8_kernels.items():
        op, bias = name.removeprefix("aten::"), "Tensor? bias, " * (name == "aten::linear")
        library.define(
            f"{op}(Tensor x, Tensor weight, {bias}Tensor integers, Tensor scale, ScalarType dtype) -> Tensor"
        )

        def call(x, weight, *others, run=kernel.run):
            *bias, integers, scale, dtype = others
            assert dtype is torch.get_autocast_dtype("cpu")
            return run((integers, scale), x, weight, *bias)

        library.impl(op, call, "CPU")
        kernel.operator = getattr(torch.ops.polycast_test_int8, op).default
        kernel.run = functools.partial(polycast.plugin.LowBitKernel.run, kernel)
    yield int8_kernels
    library._destroy()


@pytest.fixture(params=[False, True], ids=["run", "operator"])
def kernels(request, int8_kernels):
    """Return int8 kernels, which compute in run() or by operators."""
    return request.getfixturevalue("int8_operators") if request.param else int8_kernels


@pytest.fixture
def linear(engine, kernels):
    return kernels["aten::linear"]


@pytest.fixture(params=[False, True], ids=["process cache", "own cache"])
def cached(request):
    """Return settings of a region without a cache, and with one of its own."""
    return {"cache": polycast.WeightCache()} if request.param else {}


@pytest.fixture
def declined(recipe_counts):
    """Return a function that runs a layer with int8 and returns why the recipe declined it; empty if it did not."""

    def declined(layer, **settings):
        with recipe_counts() as counts:
            run(layer, **settings)
        (record,) = counts.records()
        return record.declined

    return declined


@pytest.fixture
def kernel(int8_operators):
    """Return the kernel of int8 linears that has an operator."""
    return int8_operators["aten::linear"]


@pytest.fixture
def layer():
    return torch.nn.Linear(8, 8)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.casts"


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


@pytest.fixture
def cache(model):
    cache = polycast.WeightCache()
    run(model, torch.ones(2, 8), recipe=None, cache=cache)
    return cache


@pytest.fixture
def saved(path, model, cache):
    cache.save(path, model)
    return path
