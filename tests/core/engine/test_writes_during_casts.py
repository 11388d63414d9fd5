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
TRAINED = pytest.mark.parametrize("requires_grad", [False, True], ids=["frozen", "trained"])


def region(cache):
    return polycast.autocast("cpu", cache=cache)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@TRAINED
def test_writes_of_another_thread_during_a_cast_are_seen(requires_grad, any_cache):
    weight = nn.Parameter(torch.zeros(ROWS, COLUMNS), requires_grad=requires_grad)
    begin = threading.Barrier(2)

    def write(value):
        begin.wait()
        with torch.no_grad():
            weight[:, :64].fill_(value)

    for step in range(1, STEPS + 1):
        other = threading.Thread(target=write, args=(float(step),))
        other.start()
        with region(any_cache):
            begin.wait()
            torch.mm(X, weight), torch.mm(X, weight)
            other.join()
            written = torch.mm(X, weight.detach().bfloat16())
            assert torch.equal(torch.mm(X, weight), written)
        with region(any_cache):
            assert torch.equal(torch.mm(X, weight), written)


def fill(weight, value):
    with torch.no_grad():
        weight.fill_(value)


@TRAINED
def test_a_write_while_an_older_cast_is_freed_is_seen(mark, requires_grad, any_cache):
    weight = nn.Parameter(torch.ones(2, 4), requires_grad=requires_grad)
    with region(any_cache):
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
