"""Policy tables: making and validating them, and the schemas that their policies need."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polycast import CastPolicy
from polycast.engine.kernels import REMEDIES
from polycast.plugin import STANDARD_POLICIES, policy_table
from polycast.policy.schemas import find_op, table_problems

FOR_ALL = (CastPolicy.BANNED, CastPolicy.PASSTHROUGH, CastPolicy.MATCH)
CASTING = [policy for policy in CastPolicy if policy not in FOR_ALL]
OPS = st.sampled_from(torch._C._dispatch_get_all_op_names())


@given(table=st.dictionaries(OPS, st.sampled_from(CastPolicy)))
def test_policy_table_gives_each_op_the_policy_of_its_list(table):
    lists = {policy: [name for name in table if table[name] is policy] for policy in CastPolicy}
    assert dict(policy_table(lists)) == table


@pytest.mark.parametrize(
    ("lists", "second"),
    [
        ({CastPolicy.FP32: ["aten::exp", "aten::log", "aten::exp"]}, "FP32"),
        ({CastPolicy.FP32: ["aten::exp"], CastPolicy.PROMOTE: ["aten::exp"]}, "PROMOTE"),
        ({CastPolicy.FP32: ["exp"], CastPolicy.PROMOTE: ["torch.exp"]}, "PROMOTE"),
    ],
    ids=["in one list", "in two lists", "by two short names"],
)
def test_a_table_that_names_an_op_twice_is_refused(lists, second):
    text = f"'aten::exp' is named twice, as FP32 and as {second}: an op has one policy. Remove one of the two."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        policy_table(lists)


def test_a_str_instead_of_a_list_is_refused():
    text = "names of ops must be in a list or a tuple, got 'aten::mm': write ('aten::mm',)"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        policy_table({CastPolicy.FP32: "aten::mm"})


def test_a_table_is_read_only():
    table = policy_table({CastPolicy.FP32: ["aten::exp"]})
    with pytest.raises(TypeError, match="does not support item assignment"):
        table["aten::exp"] = CastPolicy.PROMOTE


def test_every_op_of_torch_is_found_by_a_name_that_a_table_accepts():
    names = torch._C._dispatch_get_all_op_names()
    assert table_problems(dict.fromkeys(names, CastPolicy.PASSTHROUGH)) == []
    assert [name for name in names if find_op(name) is None] == []


NO_NAME = "is not an op name as the dispatcher has it, such as 'aten::mm' or 'aten::norm.Scalar'"
INVALID_NAMES = [
    *("mm", "aten:mm", "::mm", "aten::", "aten::mm.", "aten::mm.x.y", "aten::m m", "torch.ops.aten.mm", "", 7),
    *(None, "aten::mm.default.x"),
]
FP32, SET, APPEND = CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE
OUT = ("aten::mm.out", "aten::sum.IntList_out")
PROBLEMS = [
    *((it, f"must map op names to CastPolicy, got {type(it).__name__}") for it in (None, [], "aten::mm", {"aten::mm"})),
    *(
        (
            {name: FP32},
            f"{name!r} is not an op name as the dispatcher has it, such as 'aten::mm' or 'aten::norm.Scalar'",
        )
        for name in INVALID_NAMES
    ),
    (
        {"aten::mm.default": FP32},
        "'aten::mm.default' must be written 'aten::mm': the dispatcher has no overload 'default'",
    ),
    *(
        ({"aten::mm": policy}, f"the policy of 'aten::mm' must be a CastPolicy, got {policy!r}")
        for policy in ("fp32", None, torch.float32)
    ),
    *(
        ({name: SET}, f"{name!r} has no optional dtype argument, which FP32_SET_OPT_DTYPE sets")
        for name in ("aten::mm", "aten::norm.Scalar")
    ),
    *(
        ({name: APPEND}, f"{name!r} has no overload with the same arguments and a dtype, which FP32_APPEND_DTYPE calls")
        for name in ("aten::exp", "aten::mm", "aten::sum")
    ),
    *(({name: CastPolicy.MATCH}, f"{name!r} is an out= variant, whose inputs are never cast") for name in OUT),
]


def test_each_problem_of_a_table_has_its_sentence(subtests):
    for table, problem in PROBLEMS:
        with subtests.test(table=table):
            assert table_problems(table) == [problem]


def test_ops_that_torch_lacks_are_no_problem_nor_ops_that_write_and_need_no_cast():
    lacking = ["aten::of_another_version", "aten::mm.of_another_version", "acme::mm"]
    assert [find_op(name) for name in lacking] == [None] * 3
    assert table_problems(dict.fromkeys(lacking, APPEND)) == []
    assert table_problems(dict.fromkeys(["aten::index_add_", "aten::_foreach_lerp_.List"], CastPolicy.MATCH)) == []
    for policy in (CastPolicy.BANNED, CastPolicy.PASSTHROUGH):
        assert table_problems({"aten::mm.out": policy}) == []


@pytest.mark.parametrize("policy", CASTING)
def test_an_op_cannot_have_a_policy_that_casts_nothing_but_what_it_writes(policy, subtests):
    for name, problem in [
        ("aten::mm.out", "is an out= variant, whose inputs are never cast"),
        ("aten::sum.IntList_out", "is an out= variant, whose inputs are never cast"),
        ("aten::add_.Scalar", "has no tensors but those that it writes, which are never cast"),
        ("aten::add_.Tensor", None),
        ("aten::_foreach_lerp_.List", None),
        ("aten::cumsum_", "has no tensors but those that it writes, which are never cast"),
        ("aten::set_.source_Tensor", "gives a tensor another's memory or shape, which are not those of a cast"),
    ]:
        if policy.name.endswith("_DTYPE") and not name.endswith("out"):
            problem = f"writes to a tensor, whose dtype its result has: {policy.name} cannot change that"
        with subtests.test(name=name):
            assert table_problems({name: policy}) == ([] if problem is None else [f"{name!r} {problem}"])


SHORT = [
    ("softmax", CastPolicy.FP32_SET_OPT_DTYPE, {"aten::softmax.int"}),
    ("add", CastPolicy.PROMOTE, {"aten::add.Tensor", "aten::add.Scalar"}),
    ("add_", CastPolicy.PROMOTE, {"aten::add_.Tensor"}),
    ("pow.Scalar", CastPolicy.FP32, {"aten::pow.Scalar"}),
    ("mm.default", CastPolicy.FP32, {"aten::mm"}),
    ("linear", CastPolicy.LOWER_PRECISION_FP, {"aten::linear"}),
    ("of_another_version", CastPolicy.FP32, {"aten::of_another_version"}),
    ("mm.of_another_version", CastPolicy.FP32, {"aten::mm.of_another_version"}),
]


@pytest.mark.parametrize(("name", "policy", "ops"), SHORT, ids=[name for name, *_ in SHORT])
def test_a_short_name_means_the_overloads_that_a_users_policy_of_that_name_has(name, policy, ops):
    table = policy_table({policy: [name]})
    assert dict(table) == dict.fromkeys(ops, policy)
    assert table_problems(table) == []


def test_the_name_of_an_overload_takes_precedence_over_a_short_name():
    full, overload = {CastPolicy.FP32: ["aten::add.Scalar"]}, {CastPolicy.FP32: ["add.Scalar"]}
    for lists in (full, overload):
        table = policy_table({CastPolicy.PROMOTE: ["add"], **lists})
        assert dict(table) == {"aten::add.Tensor": CastPolicy.PROMOTE, "aten::add.Scalar": CastPolicy.FP32}


def test_a_short_name_that_cannot_have_its_policy_is_refused():
    with pytest.raises(ValueError, match=r"^'aten::relu_' has no tensors but those that it writes, which are never"):
        policy_table({CastPolicy.FP32: ["relu_"]})


def test_the_standard_remedies_are_for_the_banned_ops():
    banned = {name for name, policy in STANDARD_POLICIES.items() if policy is CastPolicy.BANNED}
    assert set(REMEDIES) == banned
