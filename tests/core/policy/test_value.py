"""`polycast.Policy`: merging, comparing, repr, and invalid arguments."""

import copy
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polycast import CastPolicy, Policy
from polycast.policy.op_policies import OpPolicies

TORCH = f"this torch ({torch.__version__})"
NAMES = [
    *("softmax", "aten::softmax", "softmax.int", "mm", "aten::mm.default", "mm.dtype"),
    *("norm", "norm.Scalar", "aten::norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "sum", "sum.default"),
]
POLICIES = ["fp32", "passthrough", "promote", "banned", CastPolicy.LOWER_PRECISION_FP]


def made(mapping):
    """Return OpPolicies of a mapping, without repeated ops."""
    entries = {}
    for name, policy in mapping.items():
        if name not in OpPolicies(entries):
            entries[name] = policy
    return OpPolicies(entries)


SOME_OPS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(POLICIES), max_size=4)
APPENDING = st.dictionaries(st.sampled_from(["norm", "norm.Scalar", "sum"]), st.just("fp32"), max_size=2).map(
    lambda ops: {**ops, "norm": "fp32_append_dtype"}
)
OPTIONAL = st.just({"op_of_another_torch": {"policy": "fp32", "optional": True}})
OPS = st.one_of(SOME_OPS, APPENDING, OPTIONAL).map(made)
OUTPUTS = st.sampled_from([{"output": "float32"}, {"output": torch.float32}, {"output": "bfloat16"}])
MODULES = st.dictionaries(
    st.sampled_from(["a.*", "lm_head", "**.attn", "class:torch.nn.LayerNorm"]),
    st.one_of(
        st.sampled_from(["fp32", "off", "float16", "bf16"]),
        SOME_OPS.map(made),
        st.builds(lambda ops, output: {**made(ops), **output}, SOME_OPS, OUTPUTS),
    ),
    max_size=3,
)
FLAT = st.builds(Policy, OPS, MODULES, name=st.sampled_from(["", "one", 'an "other"\n']))
POLICY = st.builds(
    lambda flat, devices: Policy(flat.ops, flat.modules, devices, flat.name),
    FLAT,
    st.dictionaries(st.sampled_from(["cpu", "cuda"]), FLAT, max_size=2),
)


@settings(deadline=None)
@given(POLICY)
def test_the_repr_can_be_pasted(policy):
    pasted = eval(repr(policy), {"Policy": Policy})
    assert (pasted, repr(pasted)) == (policy, repr(policy))


@settings(deadline=None)
@given(POLICY)
def test_a_copy_is_equal_and_has_the_same_hash(policy):
    for twin in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), policy | Policy()):
        assert (twin, hash(twin)) == (policy, hash(policy))


@settings(deadline=None)
@given(POLICY, POLICY)
def test_diff_is_empty_only_for_equal_policies(one, another):
    assert (one.diff(another) == []) is (one == another)
    assert [line[:2] for line in one.diff(another) if line[:2] not in ("- ", "+ ")] == []


@settings(deadline=None)
@given(OPS, OPS)
def test_the_right_operand_of_a_merge_takes_precedence(one, another):
    assert (one | another).resolved == {**one.resolved, **another.resolved}


@settings(deadline=None)
@given(OPS, OPS, OPS)
def test_merging_is_associative(one, two, three):
    assert ((one | two) | three).resolved == (one | (two | three)).resolved


@settings(deadline=None)
@given(POLICY, POLICY, st.sampled_from(["cpu", "cuda", "xpu"]))
def test_the_right_operand_of_a_merge_takes_precedence_on_each_device(one, another, device_type):
    both = (one | another).for_device(device_type)
    here, there = one.for_device(device_type), another.for_device(device_type)
    assert both.ops.resolved == {**here.ops.resolved, **there.ops.resolved}
    rules = {key: rule for key, rule in here.modules.items() if key not in there.modules}
    assert [*both.modules.items()] == [*rules.items(), *there.modules.items()]


@pytest.mark.parametrize(
    ("one", "another", "both"),
    [
        ({"softmax": "fp32"}, {"aten::softmax.int": "promote"}, {"softmax": "fp32", "aten::softmax.int": "promote"}),
        ({"aten::softmax.int": "promote"}, {"softmax": "fp32"}, {"softmax": "fp32"}),
        ({"mm": "fp32"}, {"aten::mm": "promote"}, {"aten::mm": "promote"}),
        ({"mm": "fp32"}, {"bmm": "promote"}, {"mm": "fp32", "bmm": "promote"}),
        (
            {"norm": "fp32"},
            {"norm": "fp32_append_dtype"},
            {"norm.ScalarOpt_dim_dtype": "fp32", "norm.ScalarOpt_dtype": "fp32", "norm": "fp32_append_dtype"},
        ),
    ],
)
def test_merge_of_two_policies(one, another, both):
    assert repr(Policy(one) | Policy(another)) == repr(Policy(both))


def test_only_the_order_of_modules_is_part_of_the_value_and_rules_of_the_right_operand_come_last():
    assert Policy({"mm": "fp32", "bmm": "fp32"}) == Policy({"bmm": "fp32", "mm": "fp32"})
    assert Policy(modules={"a": "off", "b": "off"}) != Policy(modules={"b": "off", "a": "off"})
    both = Policy(modules={"a": "off", "b": "off"}) | Policy(modules={"a": "fp32"})
    assert list(both.modules.items()) == [("b", "off"), ("a", "fp32")]


def test_spellings_are_preserved_and_do_not_affect_equality():
    one, another = Policy({"aten::softmax": "fp32"}), Policy({torch.ops.aten.softmax: CastPolicy.FP32})
    assert (one, hash(one)) == (another, hash(another))
    assert (list(one.ops), list(another.ops)) == (["aten::softmax"], ["softmax"])
    assert one.ops["softmax"] is another.ops["aten::softmax"] is CastPolicy.FP32
    assert "softmax.int" not in one.ops


def test_comparing_or_merging_with_another_type_is_a_type_error():
    mapping = {"mm": "fp32"}
    with pytest.raises(TypeError, match=r"^other must be a polycast\.Policy, got dict$"):
        Policy(mapping).diff(mapping)
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \|: 'Policy' and 'dict'"):
        Policy() | mapping
    assert Policy() != {}


def test_lines_of_a_diff():
    one = Policy({"softmax": "fp32", "mm": "fp32"}, {"a": "off", "b": "fp32"}, name="one")
    another = Policy({"mm": "fp32", "softmax": "promote"}, {"b": "fp32", "a": "off"}, {"cuda": Policy({"bmm": "fp32"})})
    assert one.diff(another) == [
        "- name = 'one'",
        "- ops.softmax = 'fp32'",
        "+ ops.softmax = 'promote'",
        "+ modules.b = 'fp32'",
        "- modules.b = 'fp32'",
        "+ devices.cuda.ops.bmm = 'fp32'",
    ]


def test_it_cannot_be_changed():
    policy = Policy({"mm": "fp32"})
    text = r"^a Policy cannot be changed: make another one, such as policy \| Policy"
    with pytest.raises(AttributeError, match=text):
        policy.name = "other"
    with pytest.raises(AttributeError, match="^a Policy cannot be changed$"):
        del policy.ops
    for mapping in (policy.modules, policy.ops):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["mm"] = "off"


def test_names_of_rules_for_modules():
    read = {"FP32": "fp32", "float32": "fp32", torch.float16: "float16", "bf16": "bfloat16", "half": "float16"}
    assert {rule: Policy(modules={"a": rule}).modules["a"] for rule in read} == read


def test_the_output_of_a_module_is_an_item_of_its_rule():
    def rule_of(rule):
        return Policy(modules={"head": rule}).modules["head"]

    rule = rule_of({"output": torch.float32, "aten::mm": "fp32"})
    assert dict(rule) == {"aten::mm": CastPolicy.FP32, "output": "float32"}
    assert rule_of({**rule}) == rule
    assert len({rule, rule_of({"mm": "fp32"}), rule_of({"mm": "fp32", "output": "half"})}) == 3
    assert "output" not in rule_of({"mm": "fp32"})


NO_RULE = (
    "a rule is 'fp32', 'off', the name of a fast dtype such as 'float16', a recipe such as 'int8', or a mapping of ops "
    "to policies; got {}"
)


OUTPUT = "modules['a']: 'output' must be a floating-point dtype such as 'float32', got "
NO_OP = "'output' is not an op, but a key of rules for modules"
UNKNOWN = "not a device type that torch's autocast knows: "
DEVICES = ", ".join(torch._C._autocast_supported_devices())
INVALID = [
    ({"ops": []}, "must map op names to CastPolicy, got list"),
    (
        {"ops": {"sofmax": "fp32", "mm": "fp23"}},
        f"{TORCH} has no op 'sofmax'; the nearest are 'softmax', '_softmax', 'fmax'; the policy of 'mm' must be a "
        "CastPolicy or the name of one, got 'fp23'; the nearest is 'fp32'",
    ),
    ({"ops": {"mm": "fp32", "aten::mm": "fp32"}}, "'aten::mm' is named twice, also as 'mm'"),
    ({"ops": {7: "fp32"}}, "expected a name such as 'mm' or 'acme::scale', an OpOverload such as torch.ops.aten.mm"),
    ({"ops": {"mm": {"policie": "fp32"}}}, "'policie' is not a key of the policy of 'mm': did you mean 'poli"),
    ({"ops": {"mm": {"policy": "fp32", "optional": 1}}}, "optional of 'mm' must be true or false, got 1"),
    ({"ops": {"mm.out": {"policy": "fp32", "optional": True}}}, "'aten::mm.out' is an out= variant"),
    ({"modules": []}, "modules must map names of modules to rules, got list"),
    ({"modules": {"a": "float15"}}, "modules['a']: " + NO_RULE.format("'float15', the nearest is 'float16'")),
    ({"modules": {"a": None}}, "modules['a']: " + NO_RULE.format("None")),
    ({"modules": {"a": "int16"}}, "modules['a']: a fast dtype is a floating-point one, got 'int16'"),
    ({"modules": {"a": {"sofmax": "fp32"}}}, f"modules['a']: {TORCH} has no op 'sofmax'; the nearest are 'softmax'"),
    ({"modules": {"a": {"output": "flaot32"}}}, f"{OUTPUT}'flaot32'; the nearest is 'float32'"),
    ({"modules": {"a": {"output": "int8"}}}, f"{OUTPUT}'int8'"),
    (
        {"ops": {"output": "float32"}},
        f"{NO_OP}: for a model write polycast.apply_policy(model, Policy(modules={{'': {{'output': 'float32'}}}}))",
    ),
    ({"ops": Policy(modules={"a": {"output": "float32"}}).modules["a"]}, NO_OP),
    ({"modules": {7: "off"}}, "modules[7]: a key is a glob over names of modules, such as 'encoder.*.norm', or "),
    ({"modules": {"class:": "off"}}, "modules['class:']: 'class:' is followed by a class's qualified name, such as"),
    ({"devices": []}, "devices must map device types to Policy, got list"),
    (
        {"devices": {"cdua": Policy()}},
        f"devices['cdua']: {UNKNOWN}did you mean 'cuda'? To use a device of another library, import the library first.",
    ),
    ({"devices": {"zzz": Policy()}}, f"devices['zzz']: {UNKNOWN}expected one of {DEVICES}. To use a device of another"),
    ({"devices": {"cuda": {}}}, "devices['cuda'] must be a Policy, got dict"),
    (
        {"devices": {"cuda": Policy(devices={"cpu": Policy()})}},
        "devices['cuda'] is a policy for one device, and cannot have devices of its own",
    ),
    ({"name": 7}, "name must be a str, got 7"),
]


def test_an_invalid_policy_is_refused(subtests):
    for arguments, problem in INVALID:
        refusal = pytest.raises(ValueError, match=f"^{re.escape(f'policy: {problem}')}")
        with subtests.test(problem=problem), refusal:
            Policy(**arguments)
