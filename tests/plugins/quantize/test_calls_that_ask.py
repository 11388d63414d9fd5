"""Calls by a recipe for which the native engine asks Python each time."""

import threading

import pytest
import torch
from tests.core.engine.wrapped import Wrapped
from tests.plugins.modes import Seen
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import polycast
from polycast.plugin import events

from .int8_linears import X, run

pytestmark = pytest.mark.usefixtures("native", "no_grad", "kernel")


class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return run(layer, x)

    @staticmethod
    def backward(ctx, grad):
        return run(ctx.layer, grad.float()).float(), None


def _listened(layer):
    def listener(*args):
        pass

    events.recipe_call.add(listener, threading.get_ident())
    try:
        run(layer, X)
    finally:
        events.recipe_call.remove(listener)


def _dual(layer):
    with forward_ad.dual_level():
        run(layer, forward_ad.make_dual(X, X))


def _mode(layer):
    with Seen():
        run(layer, X)


def _fake(layer):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        run(layer, mode.from_tensor(X))


def _negative(layer):
    assert torch.equal(run(layer, torch.complex(X, X).conj().imag), run(layer, -X))


def _function(layer):
    with torch.enable_grad():
        Inside.apply(X.clone().requires_grad_(), layer)


def _backward(layer):
    with torch.enable_grad():
        x = X.clone().requires_grad_()
        result = x * 2
        result.register_hook(lambda grad: run(layer, X).float())
        result.sum().backward()


CASES = {
    "listeners": _listened,
    "a dispatch mode": _mode,
    "torch.jit.trace": lambda layer: torch.jit.trace(lambda x: run(layer, x), X, check_trace=False),
    "vmap": lambda layer: torch.func.vmap(lambda x: run(layer, x))(X),
    "torch.func.grad": lambda layer: torch.func.grad(lambda x: run(layer, x).float().sum())(X),
    "forward-mode AD": _dual,
    "no caching": lambda layer: run(layer, X, cache_enabled=False),
    "a fake tensor": _fake,
    "a subclass that sees ops": lambda layer: run(layer, Wrapped(X)),
    "a negative view": _negative,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_python_is_asked_each_time(layer, asked, case):
    layer.requires_grad_(False)
    run(layer, X)
    before = len(asked)
    for count in (1, 2):
        CASES[case](layer)
        assert len(asked) - before >= count
    count = len(asked)
    for _ in range(2):
        run(layer, X)  # the listeners have made the engine forget
        assert len(asked) - count == (case == "listeners")


@pytest.mark.parametrize("case", [_function, _backward])
def test_what_autograd_runs_is_decided_apart_once(layer, kernel, asked, case):
    layer.requires_grad_(False)
    for _ in range(2):
        run(layer, X)
        case(layer)
    assert kernel.ran == 2
    assert asked == ["linear"] * 2


def test_a_checkpoint_that_is_recomputed_asks(layer, asked):
    layer.requires_grad_(False)
    x = X.clone().requires_grad_()
    run(layer, X)

    def forward(x):
        return run(layer, X) * x

    with torch.enable_grad():
        result = checkpoint(forward, x, use_reentrant=False).sum()
    assert asked == ["linear"]
    result.backward()
    assert asked == ["linear"] * 2


class Subclass(torch.Tensor):
    pass


def test_a_subclass_that_sees_functions_gets_results_as_without_actions(layer, asked):
    first, again = (run(layer, X.as_subclass(Subclass)) for _ in range(2))
    assert type(first) is type(again)
    assert torch.equal(first, again)
    assert asked == ["linear"]


def test_a_device_that_may_capture_is_asked(hand_made, asked, int8_operators):
    polycast.plugin.unregister_backend("cpu")
    backend = hand_made("cpu", is_capturing=lambda: False)
    backend.recipe_availability = lambda recipe: polycast.plugin.Availability(True)
    backend.low_bit_kernels = lambda recipe: int8_operators
    layer = nn.Linear(8, 8)
    for _ in range(3):
        run(layer, X)
    assert len(asked) == 3
