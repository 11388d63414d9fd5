"""Graphs of devices, whose replays write weights without Python: a CUDA graph that is emulated on the CPU.

What is captured runs too, as on no GPU. A replay writes at addresses.
"""

from types import SimpleNamespace

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

import polycast

from .cached_casts import X, parameter
from .each_cache import with_each_settings

pytestmark = [
    *NATIVE,
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="tests/gpu has tests of CUDA graphs"),
]


@pytest.fixture(autouse=True)
def _captures(monkeypatch, int8_kernels):
    """Let CUDA graphs capture what runs on the CPU."""
    state = SimpleNamespace(capturing=False)
    base = torch.cuda.CUDAGraph.__base__

    def begin(graph, **settings):
        state.capturing = True

    def end(graph):
        state.capturing = False

    for name, method in {
        "__new__": lambda cls, keep_graph: object.__new__(cls),
        "__init__": lambda graph: None,
        "capture_begin": begin,
        "capture_end": end,
        "replay": lambda graph: graph.work(),
    }.items():
        monkeypatch.setattr(base, name, staticmethod(method) if name == "__new__" else method, raising=False)
    vars(polycast.plugin.get_backend("cpu"))["is_capturing"] = lambda: state.capturing


def captured(work, replayed):
    """Return a graph that has captured a function; another does what its replays do."""
    graph = torch.cuda.CUDAGraph()
    graph.work = replayed
    graph.capture_begin()
    try:
        work()
    finally:
        graph.capture_end()
    return graph


class OfAnotherLibrary(torch.optim.Optimizer):
    """Writes as a kernel does that is given pointers."""

    def step(self):
        assert self.param_groups[0]["params"][0].data_ptr()


def step_of(optimizer, **options):
    return lambda weight: optimizer([weight], **options).step()


WRITES = {
    "SGD": step_of(torch.optim.SGD, lr=0.5, foreach=True),
    "fused SGD": step_of(torch.optim.SGD, lr=0.5, fused=True),
    "Adam": step_of(torch.optim.Adam, lr=0.5, foreach=False),
    "an optimizer of another library": step_of(OfAnotherLibrary, defaults={}),
    "mul_": lambda weight: weight.mul_(1),
    "foreach": lambda weight: torch._foreach_mul_([weight.detach()], 1),
    "out=": lambda weight: torch.mul(weight.detach(), 1, out=weight.detach()),
    "data": lambda weight: weight.data.view(-1)[:4].mul_(1),
    "a pointer": lambda weight: weight.data_ptr(),
}


def product(weight, **settings):
    with torch.no_grad(), polycast.autocast("cpu", torch.bfloat16, **settings):
        return nn.functional.linear(X, weight).float()


@with_each_settings
def test_a_replay_of_captured_writes_is_seen(settings, double_unseen, subtests):
    """torch documents the capture of a whole training step. A region without a cache is asked for a frozen weight."""
    for name, write in WRITES.items():
        with subtests.test(name):
            check_replays(write, settings(), double_unseen)


def check_replays(write, settings, double_unseen):
    weight = nn.Parameter(torch.rand(4, 4))
    product(weight, **settings)

    def step():
        with polycast.autocast("cpu", torch.bfloat16, **settings):
            nn.functional.linear(X, weight).float().sum().backward()
        with torch.no_grad():
            write(weight)

    graph = captured(step, lambda: double_unseen(weight))
    weight.requires_grad_(False)
    with polycast.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            before = [product(weight, **settings) for _ in range(3)][-1]
            graph.replay()
            assert torch.allclose(product(weight, **settings), 2 * before)


def test_a_weight_that_a_graph_has_written_is_cached_until_the_next_replay(double_unseen, cache):
    """A graph that writes no weights drops none."""
    weight = parameter()
    product(weight)
    reads = captured(lambda: product(weight), lambda: None)
    writes = captured(lambda: weight.detach().mul_(1), lambda: double_unseen(weight))
    for graph, hits in ((reads, 2), (writes, 1)):
        cache.clear()
        before = cache.stats().hits
        product(weight, cache=cache), product(weight, cache=cache)
        graph.replay()
        product(weight, cache=cache)
        assert cache.stats().hits - before == hits


def test_the_replay_of_a_graph_of_before_polycast_drops_all(double_unseen, cache):
    polycast.uninstall()
    weight = parameter()
    graph = captured(lambda: weight.detach().mul_(1), lambda: double_unseen(weight))
    before = [product(weight, cache=cache) for _ in range(2)][-1]
    graph.replay()
    assert torch.equal(product(weight, cache=cache), 2 * before)


def test_what_is_written_after_a_capture_is_not_of_its_graph(cache):
    weight = parameter()
    product(weight, cache=cache)
    with pytest.raises(ValueError, match="in the capture"):
        captured(lambda: (_ for _ in ()).throw(ValueError("in the capture")), lambda: None)
    graph = captured(lambda: torch.ones(4).mul_(2), lambda: None)
    weight.detach().mul_(2)
    product(weight, cache=cache)
    graph.replay()
    product(weight, cache=cache)
    assert cache.stats().hits == 1
