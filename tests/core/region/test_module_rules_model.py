"""Random trees of modules with rules and regions of their own, against a model that decides which applies."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import polycast
from polycast import Policy

OPS = st.sampled_from([{"mm": "fp32"}, {"mm": "lower_precision_fp"}, {"bmm": "fp32"}])
RULES = st.none() | st.sampled_from(["fp32", "off", "float16", "bfloat16"]) | OPS
REGIONS = (
    st.none()
    | st.sampled_from([{"enabled": False}, {"enabled": True}, {"dtype": torch.float16}, {"dtype": torch.bfloat16}])
    | OPS.map(lambda ops: {"policy": ops})
)
TREES = st.recursive(
    st.tuples(RULES, REGIONS, st.just([])),
    lambda inner: st.tuples(RULES, REGIONS, st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)


class Probe(nn.Module):
    """A module that opens a region, runs an op in it and calls its children."""

    def __init__(self, region, children):
        super().__init__()
        self.region, self.parts = region, nn.ModuleList(children)

    def forward(self, seen):
        x = torch.ones(2, 2, dtype=torch.bfloat16)
        with nullcontext() if self.region is None else polycast.autocast("cpu", **self.region):
            seen.append(torch.mm(x, x).dtype)
            for part in self.parts:
                part(seen)


@dataclass(frozen=True)
class State:
    enabled: bool
    dtype: torch.dtype = torch.bfloat16
    off_by_rule: bool = False
    of_modules: tuple = ()
    of_regions: tuple = ()

    def under(self, rule):
        if isinstance(rule, dict):
            return replace(self, of_modules=(rule, *self.of_modules)) if self.enabled else self
        if rule is None or not (self.enabled or self.off_by_rule):
            return self
        if rule in ("fp32", "off"):
            return replace(self, enabled=False, off_by_rule=True)
        return replace(self, enabled=True, off_by_rule=False, dtype=getattr(torch, rule))

    def inside(self, region):
        if region is None:
            return self
        return replace(
            self,
            enabled=region.get("enabled", True),
            off_by_rule=False,
            dtype=region.get("dtype", self.dtype),
            of_regions=(region["policy"], *self.of_regions) if "policy" in region else self.of_regions,
        )

    @property
    def result(self):
        if not self.enabled:
            return torch.bfloat16  # as the inputs are
        policies = [ops["mm"] for ops in (*self.of_modules, *self.of_regions) if "mm" in ops]
        return torch.float32 if policies[:1] == ["fp32"] else self.dtype


def build(tree):
    _, region, children = tree
    return Probe(region, map(build, children))


def rules_of(tree, name="root"):
    rule, _, children = tree
    rules = {} if rule is None else {name: rule}
    for number, child in enumerate(children):
        rules |= rules_of(child, f"{name}.parts.{number}")
    return rules


def expected(tree, state):
    rule, region, children = tree
    state = state.under(rule).inside(region)
    return [state.result, *(dtype for child in children for dtype in expected(child, state))]


@pytest.mark.slow
@given(TREES, st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_innermost_rule_decides_and_regions_inside_modules_say_what_they_say(engine, tree, enabled):
    model = nn.ModuleDict({"root": build(tree)})
    with polycast.apply_policy(model, Policy(modules=rules_of(tree))), polycast.autocast("cpu", enabled=enabled):
        model["root"](seen := [])
    assert seen == expected(tree, State(enabled))
