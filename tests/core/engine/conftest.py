"""Fixtures for weights, their caches, and ops of other libraries."""

import ctypes

import pytest
import torch

import polycast
from polycast.torch_internals.builtin_functions import const_data_ptr

from .cached_casts import parameter


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
def cache():
    return polycast.WeightCache()


@pytest.fixture(params=[False, True], ids=["", "cached"])
def any_cache(request):
    """Return no cache, or one."""
    return polycast.WeightCache() if request.param else None


@pytest.fixture(params=["trainable", "frozen", "leaf"])
def weight(request):
    if request.param == "leaf":
        return torch.ones(4, 4, requires_grad=True)
    return parameter(requires_grad=request.param == "trainable")


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request):
    """Run a test with one thread of torch, and with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class WhenItDies:
    """Calls a function as what it is an attribute of is freed."""

    def __init__(self, function):
        self.function = function

    def __del__(self):
        self.function()


@pytest.fixture
def mark(define, registered):
    """Return an op that has a function called as the cast is freed that it is given of a weight."""
    functions = []

    def kernel(cast):
        cast.mark = WhenItDies(functions.pop())  # the cast itself, which is kept
        return cast.clone()

    def call(weight, function):
        functions.append(function)
        torch.ops.polycast_test.mark(weight)

    define("mark(Tensor x) -> Tensor", kernel=kernel)
    registered("polycast_test::mark", polycast.CastPolicy.LOWER_PRECISION_FP)
    return call
