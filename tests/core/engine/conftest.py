"""Fixtures for ops of other libraries, weights written unseen, and recipes."""

import ctypes
import functools

import pytest
import torch

import polycast
from polycast.engine.installation import forget_choice
from polycast.torch_internals.builtin_functions import const_data_ptr

from .saved_layers import run


@pytest.fixture
def define():
    """Return a function that defines ops of another library, which return twice their first argument."""
    libraries = []

    def make(*schemas, namespace="polycast_test"):
        library = torch.library.Library(namespace, "FRAGMENT")
        libraries.append(library)
        for schema in schemas:
            library.define(schema)
            library.impl(schema.partition("(")[0], lambda x, *rest, **keywords: x + x, "CompositeExplicitAutograd")
        return library

    yield make
    for library in libraries:
        library._destroy()


@pytest.fixture
def double_unseen():
    """Return a function that doubles a float32 weight at its address, which no hook sees."""

    def double(weight):
        memory = ctypes.c_float * weight.numel()
        values = memory.from_address(const_data_ptr(weight))
        values[:] = [2 * value for value in values]

    return double


@pytest.fixture
def registered():
    """Return register_op; what it registers is removed after the test."""
    made = []

    def register(*args, **keywords):
        made.append(polycast.register_op(*args, **keywords))
        return made[-1]

    yield register
    for registration in made:
        registration.remove()


@pytest.fixture
def native(monkeypatch):
    """Run a test on the native engine only."""
    forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", "native")
    yield
    forget_choice()


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
def either_kernels(request, int8_kernels):
    """Return int8 kernels, which compute in run() or by operators."""
    return request.getfixturevalue("int8_operators") if request.param else int8_kernels


@pytest.fixture
def linear(engine, either_kernels):
    """Return the kernel of int8 linears."""
    return either_kernels["aten::linear"]


@pytest.fixture
def declined(recipe_counts):
    """Return a function that runs a layer with int8 and returns why it fell back; empty if it did not."""

    def declined(layer, **settings):
        with recipe_counts() as counts, polycast.autocast("cpu", recipe=polycast.Int8(min_size=1), **settings):
            layer(torch.randn(3, 8))
        (record,) = counts.records()
        return record.declined

    return declined


@pytest.fixture
def kernel(int8_operators):
    """Return the kernel of int8 linears that has an operator."""
    return int8_operators["aten::linear"]


@pytest.fixture
def path(tmp_path):
    """Return the path of a cache to be saved."""
    return tmp_path / "model.casts"


@pytest.fixture
def model():
    """Return two linears."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


@pytest.fixture
def saved(path, model):
    """Return the path of a saved cache of the model's casts."""
    cache = polycast.WeightCache()
    run(model, cache)
    cache.save(path)
    return path
