"""Policies of regions name every op by its short name."""

import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves

import polycast
from polycast import CastPolicy
from polycast.plugin import find_op
from polycast_plugins.testing.op_checks import call_as
from polycast_plugins.testing.samples import SAMPLES, split


@pytest.mark.filterwarnings("ignore")  # torch warns of ops that it has deprecated
def test_every_op_has_another_policy_by_its_short_name(engine):
    found, said = {}, {}
    for name, sample in SAMPLES.items():
        op = find_op(name)
        if op is not None:
            args, kwargs = arguments = split(sample(Maker()))
            short = name.removeprefix("aten::").partition(".")[0]
            with polycast.autocast("cpu", policy={short: "fp32"}):
                found[name] = outcome(functools.partial(op, *args, **kwargs))
            said[name] = outcome(functools.partial(call_as, CastPolicy.FP32, op, arguments, "cpu", torch.bfloat16))
    assert found == said
    assert sum(isinstance(dtypes, list) for dtypes in found.values()) > 150


class Maker:
    """Makes bfloat16 samples, which a policy of FP32 casts."""

    def __call__(self, *shape):
        return torch.full(shape, 0.5, dtype=torch.bfloat16)

    def spd(self, size):
        return torch.eye(size, dtype=torch.bfloat16)

    def signs(self, *shape):
        return torch.ones(shape, dtype=torch.bfloat16)

    def integers(self, values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype)


def outcome(function):
    try:
        result = function()
    except Exception as error:  # what the CPU cannot do is a result too
        return type(error)
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
