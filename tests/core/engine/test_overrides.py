"""Overrides: merging in nested regions, entering again, and freeing."""

import gc
import itertools
import random

import pytest
import torch

import polycast
from polycast import CastPolicy
from polycast.engine import state
from polycast.engine.override import Override
from polycast.region import autocast as autocast_module

pytestmark = pytest.mark.usefixtures("engine")
OPS = {
    "aten::linear": lambda x: torch.nn.functional.linear(x, x),
    "aten::hardshrink": torch.hardshrink,  # this and the others are in no table
    "aten::relu": torch.relu,
    "aten::tanh": torch.tanh,
}
DTYPES = {CastPolicy.FP32: torch.float32, CastPolicy.LOWER_PRECISION_FP: torch.bfloat16}


def test_many_overrides_merge_with_those_of_enclosing_regions():
    """Merge more pairs of overrides than the native engine caches."""
    choose, x = random.Random(0), torch.ones(2, 2)
    policies = [{op: choose.choice([*DTYPES]) for op in choose.sample([*OPS], 2)} for _ in range(12)]
    regions = [polycast.autocast("cpu", policy=policy) for policy in policies]
    for _ in range(200):
        outer, inner = choose.randrange(12), choose.randrange(12)
        with regions[outer], regions[inner]:
            expected = {**policies[outer], **policies[inner]}
            assert state.machine.innermost("cpu")[0].policies == expected
            assert {op: OPS[op](x).dtype for op in expected} == {op: DTYPES[p] for op, p in expected.items()}
        assert state.machine.innermost("cpu") == (None, None)


@pytest.mark.parametrize("op", ["to", "_to_copy"])
def test_casts_by_match_have_no_policy_of_their_own(op):
    """The values are out of the range of the fast dtype, in which the policy would put them first."""
    to, values = torch.zeros(2, dtype=torch.bfloat16), torch.full((2,), 1e6)
    with polycast.autocast("cpu", torch.float16, policy={op: "lower_precision_fp"}):
        to.index_add_(0, torch.arange(2), values)
    assert torch.equal(to, values.bfloat16())


@pytest.mark.slow
def test_overrides_of_dead_regions_are_freed():
    pairs = itertools.combinations(sorted(polycast.plugin.STANDARD_POLICIES), 2)

    def enter(count):
        for pair in itertools.islice(pairs, count):
            with polycast.autocast("cpu", policy=dict.fromkeys(pair, CastPolicy.PASSTHROUGH)):
                pass
        gc.collect()
        return sum(type(thing) is Override for thing in gc.get_objects())

    assert enter(900) <= enter(600) + 50  # the last some hundred policies are kept


@pytest.mark.parametrize("uninstalled", [False, True])
def test_a_region_that_is_entered_again_installs_nothing(monkeypatch, uninstalled):
    region = polycast.autocast("cpu", policy={"relu": "lower_precision_fp"}, cache=polycast.WeightCache())
    for _ in range(1 + uninstalled):
        polycast.uninstall()
        with region:
            pass
    monkeypatch.setattr(autocast_module, "prepare", lambda *_: pytest.fail("it is prepared again"))
    with region, region:
        assert torch.relu(torch.ones(1)).dtype is torch.bfloat16


@pytest.mark.parametrize("device_type", ["cpu", None])
def test_a_region_that_is_entered_again_after_uninstalling_has_the_kernels_of_its_ops(device_type):
    region = polycast.autocast("cpu", policy={"relu": "lower_precision_fp"})
    with region:
        pass
    polycast.uninstall(device_type)
    with polycast.autocast("cpu"):
        pass
    with region:
        assert torch.relu(torch.ones(1)).dtype is torch.bfloat16


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2,
        lambda x: 2.5 * x,
        lambda x: x * True,
        lambda x: x.float() * (1 + 2j),
        lambda x: torch.tensor([1, 2]) * 2.5,
        lambda x: x[0] * 2.5,
        lambda x: x.clone().mul_(3),
        lambda x: torch.multiply(x, 2.5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_are_no_tensors_that_promote_where_an_ops_policy_has_ended(dtype, compute):
    x = torch.ones(2, dtype=dtype, requires_grad=True)
    expected = compute(x)
    with polycast.autocast("cpu", policy={"mul": "fp32", "multiply": "fp32"}):
        torch.mul(x, x)
    with polycast.autocast("cpu"):
        found = compute(x)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    assert found.requires_grad == expected.requires_grad


def test_torch_casts_numbers_where_the_policy_for_casts_has_ended():
    x = torch.ones(2, dtype=torch.float16)
    with polycast.autocast("cpu", policy={"to": "fp32"}):
        pass
    with polycast.autocast("cpu"):
        assert (x > 0).tolist() == [True, True]  # casts the number below autograd, where a composite op has no kernel


def test_numbers_take_the_place_of_tensors_in_every_op():
    x = torch.tensor([1.0, 2.0, 3.0])
    with polycast.autocast("cpu", policy={"xlogy": "fp32"}):
        assert torch.equal(torch.xlogy(2.5, x.bfloat16()), torch.xlogy(2.5, x))
    with polycast.autocast("cpu"):
        assert torch.equal(torch.xlogy(2.5, x), x.log() * 2.5)


def test_match_keeps_the_digits_of_a_number():
    x = torch.linspace(1.5, 3, 4, dtype=torch.bfloat16)
    with polycast.autocast("cpu", policy={"mul": "match"}):
        result = x * 2.51
    assert torch.equal(result, x * 2.51)
