"""A rule that switches autocast off, and one inside it that switches it on, also on other threads."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import Policy

pytestmark = pytest.mark.usefixtures("engine")


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x):
        y = self.layer(x)
        self.seen.append(y.dtype)
        return y.float()


class Outer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.inner = Inner()
        self.call = call

    def forward(self, x):
        return self.call(self.inner, x)


def seen_in(call, rule, region=lambda: polycast.autocast("cpu")):
    model = Outer(call)
    polycast.apply_policy(model, Policy(modules={"class:Outer": rule, "inner": "float16"}))
    with region():
        y = model(torch.ones(2, 4, requires_grad=True))
    y.sum().backward()
    return model.inner.seen


@pytest.mark.parametrize("rule", ["fp32", "off"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("region", [lambda: polycast.autocast("cpu"), lambda: torch.autocast("cpu")])
def test_a_checkpoint_recomputes_a_module_that_a_rule_switches_on_again(rule, reentrant, region):
    seen = seen_in(lambda inner, x: checkpoint(inner, x, use_reentrant=reentrant), rule, region)
    assert set(seen) == {torch.float16}


def test_a_snapshot_takes_along_that_a_rule_has_switched_autocast_off(in_thread):
    def call(inner, x):
        return in_thread(polycast.capture().wrap(lambda: inner(x)))

    assert seen_in(call, "fp32") == [torch.float16]


def test_where_the_snapshot_is_applied_a_region_that_is_off_stays_off(in_thread):
    def call(inner, x):
        return in_thread(polycast.capture().wrap(lambda: polycast.autocast("cpu", enabled=False)(inner)(x)))

    assert seen_in(call, "fp32") == [torch.float32]


def test_a_snapshot_of_elsewhere_knows_nothing_of_the_rule_that_it_is_applied_under():
    with polycast.autocast("cpu", enabled=False):
        snapshot = polycast.capture()

    def call(inner, x):
        with snapshot.apply():
            return inner(x)

    assert seen_in(call, "fp32") == [torch.float32]


def test_the_steps_of_a_generator_in_a_snapshot_are_under_the_rule_too(in_thread):
    def in_steps(inner, x):
        @polycast.capture().wrap
        def steps():
            yield inner(x)
            yield inner(x)

        return in_thread(lambda: list(steps()))[1]

    assert seen_in(in_steps, "fp32") == [torch.float16, torch.float16]
    assert not polycast.capture().switched_off
