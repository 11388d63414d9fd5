"""Every op that the suite has arguments for: what explain says of it, and the policy that it has by its short name."""

import contextlib
import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import polycast
from polycast import CastPolicy, explain
from polycast.plugin import find_op
from polycast.policy.schemas import entry_problem, optional_dtype
from polycast_plugins.testing import BackendConformance
from polycast_plugins.testing.samples import SAMPLES, split
from polycast_plugins.testing.torch_policies import call_as


@pytest.fixture
def make(engine):
    """Return what makes the tensors of samples."""
    with type("TestCpu", (BackendConformance,), {"backend": "cpu"})().opened() as device:
        yield device


def changed(arguments, change):
    """Return arguments with their floating-point tensors changed."""
    return tree_map_only(torch.Tensor, lambda value: change(value) if value.is_floating_point() else value, arguments)


def variants(arguments):
    """Yield arguments in the dtypes that policies tell apart."""
    count = iter(range(1000))
    yield arguments
    yield changed(arguments, torch.Tensor.half)
    yield changed(arguments, torch.Tensor.double)
    yield changed(arguments, lambda value: value.bfloat16() if next(count) == 0 else value)


def as_explained(explained, args, kwargs):
    """Call what is explained to be called, with what it is explained to be given, outside of any region."""
    op = find_op(explained.calls)
    bound = (
        dict(zip((argument.name for argument in find_op(explained.op)._schema.arguments), args, strict=False)) | kwargs
    )
    seen = iter(explained.arguments)

    def given(value):
        return value.to(next(seen).seen) if isinstance(value, torch.Tensor) else value

    bound = {name: tree_map(given, value) for name, value in bound.items()}
    if explained.set_dtype is not None:
        position = optional_dtype(op)
        bound["dtype" if position is None else op._schema.arguments[position].name] = explained.set_dtype
    if explained.calls != explained.op:
        defaults = find_op(explained.op)._schema.arguments
        bound = {each.name: each.default_value for each in defaults if each.has_default_value()} | bound
    return op(**bound)


def outcome(function):
    torch.manual_seed(0)
    try:
        result = function()
    except Exception as error:  # an error is an outcome too
        return type(error).__name__
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of ops that it has deprecated
@pytest.mark.parametrize("policy", [None, *(each for each in CastPolicy if each is not CastPolicy.MATCH)], ids=str)
def test_explain_describes_what_the_region_does_for_every_op(make, policy):
    expected, outcomes = {}, {}
    for name, sample in SAMPLES.items():
        op = find_op(name)
        if op is None or (policy is not None and entry_problem(name, policy) is not None):
            continue
        if policy is None and explain(op, device_type="cpu").policy is None:
            continue  # its inner ops are cast instead
        own = None if policy is None else {op: policy}
        for number, (args, kwargs) in enumerate(variants(split(sample(make)))):
            with polycast.autocast("cpu", policy=own):
                explained = explain(op, *args, device_type="cpu", **kwargs)
                outcomes[name, number] = outcome(functools.partial(op, *args, **kwargs))
            # With MATCH, the ops that the op calls are autocast.
            with torch.autocast("cpu") if explained.policy is CastPolicy.MATCH else contextlib.nullcontext():
                expected[name, number] = (
                    "RuntimeError"
                    if explained.refusal
                    else outcome(functools.partial(as_explained, explained, args, kwargs))
                )
    assert expected == outcomes
    assert len(outcomes) > 5


@pytest.mark.filterwarnings("ignore")  # torch warns of ops that it has deprecated
def test_every_op_has_another_policy_by_its_short_name(make):
    found, said = {}, {}
    for name, sample in SAMPLES.items():
        op = find_op(name)
        if op is not None:
            args, kwargs = arguments = changed(split(sample(make)), torch.Tensor.bfloat16)
            short = name.removeprefix("aten::").partition(".")[0]
            with polycast.autocast("cpu", policy={short: "fp32"}):
                found[name] = outcome(functools.partial(op, *args, **kwargs))
            said[name] = outcome(functools.partial(call_as, CastPolicy.FP32, op, arguments, "cpu", torch.bfloat16))
    assert found == said
    assert sum(isinstance(dtypes, list) for dtypes in found.values()) > 150
