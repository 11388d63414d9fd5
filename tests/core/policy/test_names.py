"""Names of ops, policies and dtypes, the errors for unknown ones, and slips that are read as meant."""

import importlib.metadata
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import polycast
from polycast import CastPolicy, Policy
from polycast.policy.names import OpName, known_overloads, ops_with, read_dtype, read_op, read_policy
from polycast.policy.schemas import find_op, has_named_dimensions

BUILT_INS = sorted(
    importlib.metadata.distribution("polycast").entry_points.select(group="polycast.backends").names - {"generic"}
)
OPS = st.sampled_from(torch._C._dispatch_get_all_op_names())
EXPECTED = "expected a name such as 'softmax', 'sum.dim_IntList' or 'acme::scale'"
TORCH = f"this torch ({torch.__version__})"


def short(name):
    return name.removeprefix("aten::").partition(".")[0]


@pytest.mark.parametrize("device_type", BUILT_INS)
def test_a_short_name_in_a_region_overrides_the_tables_op(device_type, fake, hand_made):
    table = polycast.plugin.get_backend(device_type).policies
    hand_made(device_type, policies=table)
    for name in table:
        if find_op(name) is not None:
            region = polycast.autocast(device_type, policy={short(name): "passthrough"})
            assert region._settings.override.policies[name] is CastPolicy.PASSTHROUGH


@settings(deadline=None)
@given(OPS)
def test_a_dispatcher_name_is_its_only_overload(name):
    assert OpName.of_overload(name).overloads == read_op(OpName.of_overload(name).key).overloads == [name]


@settings(deadline=None)
@given(OPS)
def test_a_name_without_an_overload_means_the_functional_ones(name):
    packet = OpName(OpName.of_overload(name).qualified, None)
    for_named_tensors = has_named_dimensions(find_op(name))  # torch has them up to 2.12
    assert (name in packet.overloads) is not for_named_tensors
    assume(not for_named_tensors)
    writing = find_op(name)._schema.is_mutable
    others = any(not find_op(other)._schema.is_mutable for other in packet.overloads)
    assert (name in known_overloads(packet)) is (not writing or not others)


MEANT = [
    ("softmax", ["aten::softmax.int"]),
    ("aten::softmax", ["aten::softmax.int"]),
    ("softmax.int", ["aten::softmax.int"]),
    ("aten::softmax.int", ["aten::softmax.int"]),
    ("sum", ["aten::sum", "aten::sum.dim_IntList"]),
    ("sum.default", ["aten::sum"]),
    (torch.ops.aten.sum, ["aten::sum", "aten::sum.dim_IntList"]),
    (torch.ops.aten.sum.default, ["aten::sum"]),
    (torch.ops.aten.sum.dim_IntList, ["aten::sum.dim_IntList"]),
]


def test_overloads_of_a_name(subtests):
    for said, meant in MEANT:
        with subtests.test(said=said, meant=meant):
            assert sorted(ops_with(read_op(said), CastPolicy.FP32)) == meant


def test_a_name_means_the_overloads_that_can_have_the_policy():
    def meant(policy):
        return sorted(ops_with(read_op("norm"), policy))

    names = ("Scalar", "ScalarOpt_dim", "ScalarOpt_dim_dtype", "ScalarOpt_dtype")
    assert meant(CastPolicy.FP32_APPEND_DTYPE) == [f"aten::norm.{name}" for name in names[:2]]
    assert meant(CastPolicy.PASSTHROUGH) == [f"aten::norm.{name}" for name in names]


def test_a_ban_includes_in_place_and_out_overloads():
    assert "aten::mm.out" in ops_with(read_op("mm"), CastPolicy.BANNED)
    assert "aten::mm.out" not in ops_with(read_op("mm"), CastPolicy.PASSTHROUGH)


FP32 = CastPolicy.FP32
UNKNOWN = [
    ("sofmax", FP32, f"{TORCH} has no op 'sofmax'; the nearest are 'softmax', '_softmax', 'fmax'"),
    ("torch.Softmax", FP32, f"{TORCH} has no op 'Softmax'; the nearest are 'softmax'"),
    ("aten::sofmax.int", FP32, f"{TORCH} has no op 'sofmax'; the nearest are 'softmax', '_softmax', 'fmax'"),
    ("aten::layernorm", FP32, f"{TORCH} has no op 'layernorm'; the nearest are 'layer_norm', "),
    ("aten::qqqqqqqq", FP32, f"{TORCH} has no op 'qqqqqqqq': {EXPECTED}"),
    ("acme::qqqqqqqq", FP32, f"{TORCH} has no op 'acme::qqqqqqqq': load the library that defines it first"),
    ("softmax.Dimnam", FP32, f"{TORCH} has no overload 'Dimnam' of the op 'softmax', which has 'int', "),
    ("softmax.default", FP32, f"{TORCH} has no overload 'default' of the op 'softmax', which has "),
    ("mm.out", FP32, "'aten::mm.out' is an out= variant, whose inputs are never cast"),
    ("relu_", FP32, "'aten::relu_' has no tensors but those that it writes, which are never cast"),
    (
        "mm.default",
        CastPolicy.FP32_SET_OPT_DTYPE,
        "'aten::mm' has no optional dtype argument, which FP32_SET_OPT_DTYPE sets",
    ),
]


def test_an_op_that_is_unknown_or_cannot_have_the_policy_is_refused(subtests):
    for name, policy, problem in UNKNOWN:
        refusal = pytest.raises(ValueError, match=f"^{re.escape(problem)}")
        with subtests.test(problem=problem), refusal:
            ops_with(read_op(name), policy)


def test_an_invalid_name_is_refused(subtests):
    for name in ["", "m m", "aten:mm", "::mm", "aten::", "mm.", ".int", "mm.x.y", "torch.ops.aten.mm", "a::b::c"]:
        problem = f"^{re.escape(f'{name!r} is not the name of an op: {EXPECTED}')}$"
        with subtests.test(name=name), pytest.raises(ValueError, match=problem):
            read_op(name)


@pytest.mark.parametrize("name", ["name", "__file__", "op"])
def test_other_attributes_of_a_namespace_are_not_ops(name):
    assert read_op(name).overloads == []


def test_a_policy_may_be_its_name(subtests):
    for policy in CastPolicy:
        with subtests.test(policy=policy):
            assert {read_policy(each, "it") for each in (policy, policy.value, policy.name)} == {policy}


@pytest.mark.parametrize(
    ("policy", "rest"),
    [
        ("fp23", "'fp23'; the nearest is 'fp32'"),
        ("ban", "'ban'; the nearest is 'banned'"),
        (None, f"None: expected one of {', '.join(repr(each.value) for each in CastPolicy)}"),
    ],
)
def test_an_unknown_policy_is_refused_with_the_nearest(policy, rest):
    problem = f"the policy of 'mm' must be a CastPolicy or the name of one, got {rest}"
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        read_policy(policy, "the policy of 'mm'")


def test_names_of_a_dtype():
    assert {read_dtype(each) for each in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "rest"), [("bfloat61", "; the nearest are 'bfloat16', 'float64', 'float16'"), ("Tensor", "")]
)
def test_an_unknown_dtype_is_refused_with_the_nearest(name, rest):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name!r} is not a dtype{rest}')}$"):
        read_dtype(name)


def test_float32_is_a_policy_of_ops_and_another_dtype_is_refused_with_the_policy_for_it():
    slips = "float32", "torch.float32", "FP32", torch.float32
    assert {Policy({"linear": float32}) for float32 in slips} == {Policy({"linear": "fp32"})}
    for dtype in ("bfloat16", torch.float16):
        text = f"got {dtype!r}: for the fast dtype of the region write 'lower_precision_fp'"
        with pytest.raises(ValueError, match=re.escape(text)):
            Policy({"linear": dtype})


@pytest.mark.parametrize("name", ["torch.softmax", "F.softmax", "torch.nn.functional.softmax"])
def test_names_of_python_functions_are_names_of_ops(name):
    assert Policy({name: "fp32"}) == Policy({"softmax": "fp32"})
    with polycast.autocast("cpu", policy={name: "fp32"}):
        assert torch.randn(2, 2).bfloat16().softmax(-1).dtype is torch.float32


@pytest.mark.parametrize("name", ["fp32", "FP32", "float32", "banned"])
def test_the_name_of_a_cast_policy_is_not_a_policy_unless_a_file_has_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"policy='{name}' is the name of a cast policy, not a policy file. A policy names ops"
    with pytest.raises(ValueError, match=text):
        polycast.autocast("cpu", policy=name)
    Policy({"softmax": "fp32"}).save(name)
    with polycast.autocast("cpu", policy=name):
        assert torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype is torch.float32


def test_a_mapping_of_modules_says_how_to_write_it():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    said = {
        "0": "policy: '0' is a module, and a mapping names ops. For modules write "
        "polycast.apply_policy(model, polycast.Policy(modules={'0': 'fp32'}))",
        "1": "policy: '1' is not the name of an op",
    }
    for name, text in said.items():
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            polycast.apply_policy(model, {name: "fp32"})
