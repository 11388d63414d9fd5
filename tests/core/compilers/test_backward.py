"""In compiled code, too, ops that policies keep in float32 have float32 gradients."""

import contextlib
import functools
import uuid

import pytest
import torch
from torch import nn

import polycast
from polycast import Policy

pytestmark = pytest.mark.usefixtures("engine")
POLICY, NO_REGION = {"linear": "fp32"}, contextlib.nullcontext()


class Model(nn.Module):
    def __init__(self, rule=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)
        if rule is not None:
            polycast.apply_policy(self, Policy(modules={"layer": rule}))

    def forward(self, x):
        return self.layer(x)


class WithPolicy(Model):
    def forward(self, x):
        with polycast.autocast("cpu", policy=POLICY):
            return self.layer(x)


class SwitchedOff(Model):
    def forward(self, x):
        with polycast.autocast("cpu", enabled=False):
            return self.layer(x)


def gradient(model, region=NO_REGION, backend=None, fullgraph=True):
    call = model if backend is None else torch.compile(model, backend=backend, fullgraph=fullgraph)
    with region:
        y = call(torch.linspace(-1, 1, 2048).reshape(32, 64))
    assert y.dtype is torch.float32
    y.square().sum().backward()
    return model.layer.weight.grad


MODELS = {
    "policy outside": (Model, POLICY),
    "policy inside": (WithPolicy, None),
    **{str(rule): (functools.partial(Model, rule), None) for rule in ("fp32", "off", POLICY)},
}


@pytest.mark.parametrize(("make", "policy"), MODELS.values(), ids=MODELS)
def test_a_compiled_backward_is_traced_outside_of_regions_as_it_runs_in_eager_mode(make, policy):
    found = gradient(make(), polycast.autocast("cpu", policy=policy), "aot_eager")
    torch.testing.assert_close(found, gradient(Model()))


@pytest.mark.parametrize(
    "outside", [True, pytest.param(False, marks=pytest.mark.xfail(strict=True, raises=RuntimeError))]
)
def test_a_backward_of_a_region_in_the_code_runs_outside_of_regions(outside):
    layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), torch.randn(4, 16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        with polycast.autocast("cpu", policy=POLICY):
            return layer(x)

    loss = function(x).sum()
    with polycast.autocast("cpu", enabled=not outside):  # torch disables autocast only if it was on at compile time
        loss.backward()


def test_where_a_backward_is_configured_to_be_autocast_it_is():
    with torch._functorch.config.patch(backward_pass_autocast=[{"device_type": "cpu"}]):
        found = gradient(Model("fp32"), polycast.autocast("cpu"), "aot_eager")
    assert not torch.allclose(found, gradient(Model()), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_cache_tells_a_backward_under_rules_from_one_without():
    expected = gradient(Model())
    tag = str(uuid.uuid4())  # what earlier tests saved is not found
    for make, is_exact in ((SwitchedOff, False), (lambda: Model("off"), True), (SwitchedOff, False)):
        torch.compiler.reset()
        with torch.compiler.config.patch(cache_key_tag=tag):
            found = gradient(make(), polycast.autocast("cpu"), "inductor")
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5) is is_exact


def test_a_torch_whose_backward_cannot_be_configured_is_told(monkeypatch):
    import torch._functorch._aot_autograd.graph_capture  # noqa: F401  # what compiles imports it

    polycast.uninstall()
    monkeypatch.delattr("torch._functorch._aot_autograd.graph_capture.create_joint")
    text = r"does not support the internals of this torch .*create_joint.* gradients of ops that policies keep"
    with pytest.warns(UserWarning, match=text), polycast.autocast("cpu", policy={"mm": "fp32"}):
        pass


class Interrupted(Model):
    def forward(self, x):
        with polycast.autocast("cpu", policy=POLICY):
            torch._dynamo.graph_break()
            return self.layer(x)


def test_gradients_after_a_graph_break_in_a_region_with_a_policy_are_those_of_eager_code():
    expected = gradient(Interrupted(), polycast.autocast("cpu"))
    found = gradient(Interrupted(), polycast.autocast("cpu"), "aot_eager", fullgraph=False)
    torch.testing.assert_close(found, expected)
