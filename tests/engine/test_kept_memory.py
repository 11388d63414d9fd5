"""The native engine writes a region's casts into the memory of the last region's, where nothing else holds it."""

import gc
import resource
import sys

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import polycast
from polycast.engine import installation


@pytest.fixture(autouse=True)
def _native(monkeypatch):
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", "native")
    polycast.clear_autocast_cache()
    yield
    polycast.clear_autocast_cache()
    installation.forget_choice()


X = torch.ones(4, 4, dtype=torch.bfloat16)


def casts_saved(function):
    """Return what a function returns, and the tensors other than X that it saves for its backward."""
    saved = []

    def pack(tensor):
        if tensor.dtype is torch.bfloat16 and tensor.data_ptr() != X.data_ptr():
            saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return function(), saved


def frozen(value=1.0):
    return nn.Parameter(torch.full((4, 4), value), requires_grad=False)


def events(function):
    """Return how often a function calls what allocates a cast, and what fills one."""
    with torch.profiler.profile(acc_events=True) as profile:
        function()
    counts = {event.key: event.count for event in profile.key_averages()}
    return counts.get("aten::empty_strided", 0), counts.get("aten::copy_", 0)


def test_the_next_region_allocates_nothing_for_the_casts():
    weight = frozen()

    def run():
        with torch.no_grad(), polycast.autocast("cpu"):
            torch.mm(X, weight)

    assert events(run) == (1, 1)
    assert events(run) == (0, 1)
    polycast.clear_autocast_cache()
    assert events(run) == (1, 1)


def test_the_next_region_sees_a_write_through_data():
    weight = frozen(1.0)
    with polycast.autocast("cpu"):
        before = torch.mm(X, weight)
    weight.data.mul_(2)
    with polycast.autocast("cpu"):
        assert torch.equal(torch.mm(X, weight), 2 * before)


def test_memory_that_a_graph_holds_is_not_written():
    weight = frozen(1.0)

    def forward():
        x = X.clone().requires_grad_()
        with polycast.autocast("cpu"):
            return x, torch.mm(x, weight)

    x, out = forward()
    with torch.no_grad():
        weight.mul_(3)
    other_x, other = forward()
    out.sum().backward()
    other.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 4.0, dtype=torch.bfloat16))
    assert torch.equal(other_x.grad, torch.full((4, 4), 12.0, dtype=torch.bfloat16))


def test_memory_that_somebody_keeps_is_not_written():
    weight = frozen(1.0)
    with polycast.autocast("cpu"):
        _, saved = casts_saved(lambda: torch.mm(X.clone().requires_grad_(), weight))
    (kept,) = [tensor for tensor in saved if torch.equal(tensor, torch.ones_like(tensor))][:1]
    with torch.no_grad():
        weight.mul_(3)
    with polycast.autocast("cpu"):
        torch.mm(X, weight)
    assert torch.equal(kept, torch.ones(4, 4, dtype=torch.bfloat16))


def test_casts_with_history_are_given_back_as_the_region_ends():
    weight = nn.Parameter(torch.ones(4, 4))
    with polycast.autocast("cpu"):
        out = torch.mm(X, weight)
    (node,) = [node for node, _ in out.grad_fn.next_functions if node is not None]
    assert node.name() == "ToCopyBackward0"
    out.sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 4.0))


def test_memory_does_not_grow_over_ten_thousand_regions_and_dying_weights():
    def regions(count):
        for _ in range(count):
            weight = nn.Parameter(torch.ones(64, 64))
            x = torch.ones(1, 64)
            with polycast.autocast("cpu"):
                torch.mm(x, weight)
            with torch.no_grad(), polycast.autocast("cpu"):
                torch.mm(x, weight)

    regions(2000)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    regions(10_000)
    gc.collect()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # 10,000 casts that were not given back would be 80 MB; ru_maxrss is in KiB, on macOS in bytes.
    assert grown < 16 * 1024 * (1024 if sys.platform == "darwin" else 1)
