"""Findings about casts by MATCH: what they cost, and where they overflow in the dtype of a written tensor."""

import json

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn

import polycast
from polycast_plugins.observe import Observation
from polycast_plugins.observe.facts import Facts
from polycast_plugins.observe.records import Cast, NumericsRecord, Op

SIZE = 1 << 15
"""The values whose cast to a 16-bit dtype is just large enough for a finding."""


def adds():
    """Return a model that adds rows to a tensor of another dtype, as a router of experts does."""
    return Defined(lambda self, to, values: to.index_add_(0, torch.arange(len(values)), values))


def test_large_casts_are_found_with_op_module_and_dtypes(engine, findings, in_region):
    net, to, x = nn.Sequential(adds()), torch.zeros(SIZE, dtype=torch.bfloat16), torch.ones(SIZE)
    (found,) = findings("matched_dtypes", in_region(lambda: net[0](to, x), 3), net)
    assert (found.where, found.module, found.ops, found.count) == ("0", "0", ("aten::index_add_",), 3)
    assert found.bytes == 3 * 2 * SIZE
    assert found.bytes_per_second > 0
    assert found.what == (
        "torch would refuse the dtypes of the inputs of aten::index_add_, so those in float32 are cast to bfloat16, "
        "3 times: 196.6 KB cast."
    )
    assert found.remedy == "Create the tensor that it writes in float32, or the values in bfloat16."


TO, X = torch.zeros(SIZE, dtype=torch.bfloat16), torch.ones(SIZE)
MATCHED = {
    "small casts": (lambda: adds()(TO, X[:-1]), []),
    "equal dtypes": (lambda: adds()(TO.float(), X), []),
    "a list that the op writes": (lambda: torch._foreach_lerp_([TO], [X], 0.5), [("aten::_foreach_lerp_.Scalar",)]),
}


@pytest.mark.parametrize(("run", "ops"), MATCHED.values(), ids=MATCHED)
def test_large_casts_are_found(engine, run, ops, findings, in_region):
    found = findings("matched_dtypes", in_region(run, 3))
    assert [(each.ops, each.count) for each in found] == [(each, 3) for each in ops]


REMEDIES = {
    "aten::index_add_": "Create the tensor that it writes in bfloat16, or the values in float32.",
    "aten::lerp.Scalar": "Create all its inputs in one dtype: float32 or bfloat16.",
    "aten::native_layer_norm": "Convert the weights of its module to float32: `module.float()`.",
}


@pytest.mark.parametrize("op", REMEDIES)
def test_remedy_is_for_the_kind_of_op(op):
    cast = Cast(op, "forward", "0", "bfloat16", "float32", "activation", 1, 1 << 20, policy="match")
    seen = Op(calls=1, input_dtypes={"bfloat16": 1, "float32": 1}, op=op, policy="match")
    assert [found.remedy for found in Observation(Facts(ops=(seen,), casts=(cast,))).findings] == [REMEDIES[op]]


def test_op_without_a_16_bit_kernel_is_left(engine, findings, in_region):
    x = torch.full((SIZE,), 2.0).bfloat16()
    (found,) = findings("matched_dtypes", in_region(lambda: torch.special.zeta(x, x)))
    assert found.remedy == "Leave it, or create its inputs in float32: torch has no kernel for bfloat16."


def test_norm_is_one_finding_whose_remedy_helps(engine):
    net, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)), torch.ones(SIZE // 64, 64)
    net[1].bias = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))  # as after a partial conversion
    for expected in ([("matched_dtypes", "1")], []):
        with torch.no_grad(), polycast.observe(net) as seen, polycast.autocast("cpu"):
            net(x)
        assert [(each.kind, each.where) for each in seen.findings if each.kind != "slow_dtype"] == expected
        net[1].float()


def test_matched_weights_are_not_said_to_need_a_cache(engine):
    weight, to = nn.Parameter(torch.ones(SIZE)), torch.zeros(SIZE, dtype=torch.bfloat16)
    with torch.no_grad(), polycast.observe() as seen:
        for _ in range(2):
            with polycast.autocast("cpu"):
                adds()(to, weight)
    assert seen.total.recasts == 1
    assert {found.kind for found in seen.findings} - {"slow_dtype"} == {"matched_dtypes"}


def test_casts_say_which_policy_asked_for_them(engine):
    to, x = torch.zeros(4, dtype=torch.bfloat16), torch.ones(4)
    with polycast.observe() as seen, polycast.autocast("cpu"):
        adds()(to, x)
        torch.outer(x, x) @ torch.ones(4, 4)
        torch.lerp(to, x, 0.5)
    assert {"aten::to.dtype", "aten::_to_copy"}.isdisjoint(op.op for op in seen.ops)  # of the casts
    assert {cast.op: cast.policy for cast in seen.casts} == {
        "aten::index_add_": "match",
        "aten::lerp.Scalar": "match",
        "aten::matmul": "lower_precision_fp",
    }
    said = json.loads(json.dumps(seen.to_dict()))
    assert Observation.from_dict(said).casts == seen.casts
    for cast in said["casts"]:
        del cast["policy"]  # which older versions did not write
    assert {cast.policy for cast in Observation.from_dict(said).casts} == {None}


CREATE = (
    " Its inputs in {} are cast to float16, the dtype of the tensor that it writes. float16 has less range than "
    "float32. Create the tensor that it writes in float32, or use bfloat16. With "
    '`policy={{"index_add_": "passthrough"}}` torch raises instead.'
)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_overflow_in_the_dtype_of_a_written_tensor_is_found(engine, source):
    net, to = nn.Sequential(adds()), torch.zeros(4, dtype=torch.float16)
    x = torch.full((4,), 1e6, dtype=source)
    with polycast.observe(net, nonfinite="record", numerics=True) as seen, polycast.autocast("cpu"):
        net[0](to, x)
    assert (seen.nonfinite.op, seen.nonfinite.module, seen.nonfinite.count) == ("aten::index_add_", "0", 1)
    assert "test_matched_findings.py" in seen.nonfinite.stack[-1]
    found = {each.kind: each for each in seen.findings if each.kind != "slow_dtype"}
    assert {kind: (each.module, each.ops) for kind, each in found.items()} == dict.fromkeys(
        ("nonfinite", "overflow"), ("0", ("aten::index_add_",))
    )
    assert all(str(each).endswith(CREATE.format(str(source)[6:])) for each in found.values())
    with (
        pytest.raises(RuntimeError, match="same scalar type"),
        polycast.autocast("cpu", policy={"index_add_": "passthrough"}),
    ):
        net[0](to, x)


def test_overflow_of_the_op_itself_is_not_one_of_its_casts():
    cast = Cast("aten::index_add_", "forward", "0", "float32", "float16", "activation", 1, policy="match")
    result = NumericsRecord("0", "aten::index_add_", "forward", "float16", 4, 6e4, overflowed=4)
    (found,) = Observation(Facts(casts=(cast,), numerics=(result,))).findings
    assert "cast to" not in found.what
    assert "passthrough" not in found.remedy
