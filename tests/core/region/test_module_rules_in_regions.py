"""Module rules and the regions around and inside modules: which of them decides, also on other threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import Policy

from .conftest import Block, Does

pytestmark = pytest.mark.usefixtures("engine")
X = torch.ones(2, 2)


def square(x):
    return torch.mm(x, x)


@pytest.mark.parametrize(("rule", "dtype"), [("fp32", torch.float32), ("float16", torch.float16)])
def test_rules_apply_in_torchs_regions(under, rule, dtype):
    model = under(square, rule)
    polycast.install("cpu")
    with torch.autocast("cpu"):
        assert square(X).dtype is torch.bfloat16
        assert model(X).dtype is dtype


def test_explain_op_names_the_rule_of_a_module():
    model = nn.ModuleDict({"one": Does(lambda: [polycast.plugin.explain_op(op, "cpu") for op in ("mm", "bmm")])})
    polycast.apply_policy(model, Policy(modules={"one": {"mm": "fp32"}}))
    with polycast.autocast("cpu", policy={"bmm": "fp32"}):
        found, other = model["one"]()
    assert (found.rule, found.policy) == ("module rule", polycast.CastPolicy.FP32)
    assert "module rule" in str(found)
    assert "one" in found.rule_name
    assert other.rule == "region's policy"


def test_two_threads_with_two_policies_over_one_model():
    model = nn.Sequential(nn.Linear(4, 4))
    polycast.apply_policy(model, Policy(modules={"0": {"layer_norm": "fp32"}}))
    policies = {"fp32": torch.float32, "lower_precision_fp": torch.bfloat16}
    together = threading.Barrier(2)

    def work(policy):
        for _ in range(50):
            together.wait()
            with polycast.autocast("cpu", policy={"linear": policy}):
                yield model(torch.ones(1, 4)).dtype

    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda policy: {*work(policy)}, policies)
        assert dict(zip(policies, found, strict=True)) == {policy: {dtype} for policy, dtype in policies.items()}


def test_rules_that_change_during_a_call_decide_from_the_next_call_on(under):
    called, changed = threading.Event(), threading.Event()

    class Waiting(dict):
        def items(self):  # is called while the rule casts the arguments
            called.set()
            assert changed.wait(60)
            return super().items()

    def work():
        with polycast.autocast("cpu"):
            model(Waiting(x=X.bfloat16()))

    model = under(lambda inputs: square(inputs["x"]))
    thread = threading.Thread(target=work)
    thread.start()
    assert called.wait(60)
    polycast.apply_policy(model, Policy(modules={"": "bfloat16"}))
    changed.set()
    thread.join()
    with polycast.autocast("cpu"):
        assert model({"x": X}).dtype is torch.bfloat16


class Outer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.inner = Block()
        self.call = call

    def forward(self, x):
        return self.call(self.inner, x)


def seen_in(call, rule, region=lambda: polycast.autocast("cpu")):
    model = Outer(call)
    polycast.apply_policy(model, Policy(modules={"class:Outer": rule, "inner": "float16"}))
    with region():
        y = model(torch.ones(2, 8, requires_grad=True))
    y.sum().backward()
    return model.inner.seen


@pytest.mark.parametrize("rule", ["fp32", "off"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("region", [lambda: polycast.autocast("cpu"), lambda: torch.autocast("cpu")])
def test_a_checkpoint_recomputes_a_module_that_a_rule_switches_on_again(rule, reentrant, region):
    seen = seen_in(lambda inner, x: checkpoint(inner, x, use_reentrant=reentrant), rule, region)
    assert set(seen) == {torch.float16}


def two_steps(inner, x):
    yield inner(x)
    yield inner(x)


def off(inner):
    return polycast.autocast("cpu", enabled=False)(inner)


SNAPSHOTS = {
    "a call": (lambda wrap, inner, x: wrap(inner)(x), [torch.float16]),
    "a region that is off": (
        lambda wrap, inner, x: wrap(polycast.autocast("cpu", enabled=False)(inner))(x),
        [torch.float32],
    ),
    "steps of a generator": (lambda wrap, inner, x: list(wrap(two_steps)(inner, x))[1], [torch.float16] * 2),
}


@pytest.mark.parametrize(("call", "expected"), SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_a_snapshot_takes_along_that_a_rule_has_switched_autocast_off(in_thread, call, expected):
    def on_a_thread(inner, x):
        wrap = polycast.capture().wrap
        return in_thread(lambda: call(wrap, inner, x))

    assert seen_in(on_a_thread, "fp32") == expected
    assert not polycast.capture().switched_off


def test_a_snapshot_of_elsewhere_knows_nothing_of_the_rule_that_it_is_applied_under():
    with polycast.autocast("cpu", enabled=False):
        snapshot = polycast.capture()

    def call(inner, x):
        with snapshot.apply():
            return inner(x)

    assert seen_in(call, "fp32") == [torch.float32]
