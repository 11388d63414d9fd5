"""Weights that are written during a cast: the cast may be torn, and serves no later op."""

import threading

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

import polycast

pytestmark = NATIVE

STEPS, ROWS, COLUMNS = 20, 2, 2**19
X = torch.ones(1, ROWS, dtype=torch.bfloat16)
CACHES = pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
TRAINED = pytest.mark.parametrize("requires_grad", [False, True], ids=["frozen", "trained"])


def region(cache):
    return polycast.autocast("cpu", cache=cache)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@CACHES
@TRAINED
def test_writes_of_another_thread_during_a_cast_are_seen(requires_grad, cached):
    weight = nn.Parameter(torch.zeros(ROWS, COLUMNS), requires_grad=requires_grad)
    cache = polycast.WeightCache() if cached else None
    begin = threading.Barrier(2)

    def write(value):
        begin.wait()
        with torch.no_grad():
            weight[:, :64].fill_(value)

    for step in range(1, STEPS + 1):
        other = threading.Thread(target=write, args=(float(step),))
        other.start()
        with region(cache):
            begin.wait()
            torch.mm(X, weight), torch.mm(X, weight)
            other.join()
            written = torch.mm(X, weight.detach().bfloat16())
            assert torch.equal(torch.mm(X, weight), written)
        with region(cache):
            assert torch.equal(torch.mm(X, weight), written)


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


def fill(weight, value):
    with torch.no_grad():
        weight.fill_(value)


@CACHES
@TRAINED
def test_a_write_while_an_older_cast_is_freed_is_seen(mark, requires_grad, cached):
    weight = nn.Parameter(torch.ones(2, 4), requires_grad=requires_grad)
    with region(polycast.WeightCache() if cached else None):
        with torch.no_grad():
            torch.mm(X, weight), torch.mm(X, weight)
            mark(weight, lambda: fill(weight, 3))
            weight.fill_(2)
        torch.mm(X, weight)  # casts the weight again, and frees the cast that it replaces
        assert torch.equal(weight, torch.full((2, 4), 3.0))
        assert torch.mm(X, weight)[0, 0] == 6


def test_a_write_while_room_is_made_for_a_cast_is_seen(mark):
    weight, large, larger = (nn.Parameter(torch.ones(2, size), requires_grad=False) for size in (4, 2**16, 2**17))
    with torch.no_grad(), region(None):
        torch.mm(X, weight), torch.mm(X, weight)
        mark(large, lambda: fill(weight, 3))
        torch.mm(X, larger)
        assert torch.mm(X, weight)[0, 0] == 2 * weight[0, 0]
