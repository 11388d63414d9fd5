"""explain describes what the engines do and which rule decides, and its errors."""

import functools
import json
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map

import polycast
from polycast import CastPolicy, Policy, explain
from polycast.engine.override import make_override
from polycast.engine.state import Settings
from polycast.plugins.registry import registry
from polycast.policy.schemas import find_op, optional_dtype
from polycast.policy.validation import entry_problem
from polycast.region.explain import explain_in
from polycast.testing.samples import SAMPLES, split

X = torch.ones(2, 2)


class Maker:
    """Makes the tensors of samples."""

    def __call__(self, *shape):
        return torch.full(shape, 0.5)

    def spd(self, size):
        return torch.eye(size)

    def signs(self, *shape):
        return torch.ones(shape)

    def integers(self, values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype)


def variants(arguments):
    """Return arguments in the dtypes that policies tell apart."""
    count = iter(range(1000))
    changes = [
        lambda value: value,
        lambda value: value.to(torch.float16),
        lambda value: value.to(torch.float64),
        lambda value: value.to(torch.bfloat16) if next(count) == 0 else value,
    ]
    for change in changes:
        yield tree_map(
            lambda value, change=change: (
                change(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            ),
            arguments,
        )


def as_told(told, args, kwargs):
    """Call what is told to be called, with what it is told to be given, outside of any region."""
    op = find_op(told.calls)
    bound = dict(zip((argument.name for argument in find_op(told.op)._schema.arguments), args, strict=False)) | kwargs
    seen = iter(told.arguments)

    def given(value):
        return value.to(next(seen).seen) if isinstance(value, torch.Tensor) else value

    bound = {name: tree_map(given, value) for name, value in bound.items()}
    if told.set_dtype is not None:
        position = optional_dtype(op)
        bound["dtype" if position is None else op._schema.arguments[position].name] = told.set_dtype
    if told.calls != told.op:
        defaults = find_op(told.op)._schema.arguments
        bound = {each.name: each.default_value for each in defaults if each.has_default_value()} | bound
    return op(**bound)


def outcome(function):
    torch.manual_seed(0)
    try:
        result = function()
    except Exception as error:  # what the CPU cannot do is a result too
        return type(error).__name__
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of ops that it has deprecated
@pytest.mark.parametrize("policy", [None, *CastPolicy], ids=str)
def test_explain_describes_what_the_region_does_for_every_op(engine, policy):
    told_outcomes, outcomes = {}, {}
    for name, sample in SAMPLES.items():
        op = find_op(name)
        if op is None or (policy is not None and entry_problem(name, policy) is not None):
            continue
        if policy is None and explain(op, "cpu").policy is None:
            continue  # what it is made of is cast in turn
        own = None if policy is None else {op: policy}
        for number, (args, kwargs) in enumerate(variants(split(sample(Maker())))):
            with polycast.autocast("cpu", policy=own):
                told = explain(op, "cpu", *args, **kwargs)
                outcomes[name, number] = outcome(functools.partial(op, *args, **kwargs))
            told_outcomes[name, number] = (
                "RuntimeError" if told.refusal else outcome(functools.partial(as_told, told, args, kwargs))
            )
    assert told_outcomes == outcomes
    assert len(outcomes) > 5


SEEN = []
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64]
TENSORS = st.sampled_from(DTYPES).map(lambda dtype: torch.ones(2, dtype=dtype))


@pytest.fixture(scope="module")
def library():
    """An op with every kind of argument, whose kernel notes what it sees."""
    made = torch.library.Library("polycast_test", "FRAGMENT")
    made.define("all(Tensor a, Tensor? b, Tensor[] c, Tensor?[] d, float e=1.0, *, ScalarType? dtype=None) -> Tensor")

    def kernel(a, b, c, d, e=1.0, *, dtype=None):
        SEEN[:] = [*(tensor.dtype for tensor in [a, b, *c, *d] if tensor is not None), dtype]
        return a.clone()

    made.impl("all", kernel, "CompositeExplicitAutograd")
    yield made
    made._destroy()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arguments=st.tuples(
        TENSORS,
        st.none() | TENSORS,
        st.lists(TENSORS, min_size=1, max_size=2),
        st.lists(st.none() | TENSORS, min_size=1, max_size=2),
    ),
    dtype=st.sampled_from([{}, {"dtype": None}, {"dtype": torch.float16}]),
    policy=st.sampled_from([each for each in CastPolicy if each.name not in ("BANNED", "FP32_APPEND_DTYPE")]),
    enabled=st.booleans(),
)
def test_the_explained_dtypes_are_those_that_the_kernel_sees(engine, library, arguments, dtype, policy, enabled):
    with polycast.autocast("cpu", enabled=enabled, policy={"polycast_test::all": policy}):
        told = explain("polycast_test::all", "cpu", *arguments, **dtype)
        torch.ops.polycast_test.all(*arguments, **dtype)
    assert [*(argument.seen for argument in told.arguments), told.set_dtype or dtype.get("dtype")] == SEEN


def test_the_text_says_the_policy_the_rule_and_the_casts():
    with polycast.autocast("cpu", policy=Policy({"softmax": "fp32"}, name="careful")):
        assert str(explain("softmax", "cpu", X.bfloat16(), 0)).splitlines() == [
            "aten::softmax.int on cpu, a region of bfloat16",
            "fp32 (region's policy 'careful'): its inputs are cast to float32",
            "  self: bfloat16 -> float32",
        ]
        assert str(explain("cat", "cpu", [X, X])).splitlines()[1:] == [
            "promote (backend's table): its inputs are cast to float32 if their dtypes differ",
            "  tensors[0]: float32, unchanged",
            "  tensors[1]: float32, unchanged",
        ]
        assert str(explain("relu", "cpu", X)).splitlines()[1] == (
            "no policy (none): it runs unchanged, and autocast applies to its inner ops"
        )


def test_outside_a_region_it_tells_what_would_decide():
    assert str(explain("mm", "cpu", X, X)).splitlines() == [
        "aten::mm on cpu, autocast is off",
        "lower_precision_fp (backend's table): its inputs are cast to bfloat16, in a region",
        "  self: float32, unchanged",
        "  mat2: float32, unchanged",
    ]


def test_a_banned_op_tells_what_it_raises():
    with polycast.autocast("cpu", policy={"mm": "banned"}):
        told = explain("mm", "cpu", X, X)
        with pytest.raises(RuntimeError, match=f"^{re.escape(told.refusal)}"):
            torch.mm(X, X)
    assert str(told).splitlines()[2] == f"  RuntimeError: {told.refusal}"


def test_a_dtype_that_is_given_and_an_overload_that_is_called_instead_are_told():
    with polycast.autocast("cpu", policy={"sum": "fp32_set_opt_dtype", "norm": "fp32_append_dtype"}):
        total, norm = explain("sum", "cpu", X.half()), explain("norm", "cpu", X.half(), 2)
    assert str(total).splitlines()[2:] == ["  self: float16, unchanged", "  dtype: float32 is given"]
    assert str(norm).splitlines()[2:] == [
        "  self: float16, unchanged",
        "  dtype: float32 is given",
        "  aten::norm.ScalarOpt_dtype is called",
    ]


def test_without_arguments_each_overload_is_explained_those_with_a_policy_first():
    with polycast.autocast("cpu", policy={"norm": "fp32_append_dtype"}):
        told = explain("norm", "cpu")
    assert [(each.op, each.policy is not None) for each in (told, *told.others)] == [
        ("aten::norm.Scalar", True),
        ("aten::norm.ScalarOpt_dim", True),
        ("aten::norm.ScalarOpt_dim_dtype", False),
        ("aten::norm.ScalarOpt_dtype", False),
    ]
    assert len(str(told).splitlines()) == 5


def test_the_inner_region_decides_and_its_name_is_told():
    with polycast.autocast("cpu", policy=Policy({"mm": "fp32", "bmm": "fp32"}, name="outer")):
        with polycast.autocast("cpu", policy=Policy({"mm": "promote"}, name="inner")):
            assert explain("mm", "cpu").rule_name == "inner"
            assert explain("bmm", "cpu").rule_name == "outer"
            assert explain("bmm", "cpu", policy=Policy({"bmm": "promote"}, name="asked")).rule_name == "asked"
            snapshot = polycast.capture()
        assert explain("mm", "cpu").rule_name == "outer"
    with snapshot.apply():
        assert explain("mm", "cpu").rule_name == "inner"


def override(policies, rule="region's policy", name=""):
    return make_override("cpu", frozenset(policies.items()), rule, name, None, None)


def test_an_override_knows_its_rules():
    rule = override({"aten::mm": CastPolicy.FP32}, "module rule", "encoder.*")
    region = Settings("cpu", True, torch.bfloat16, override=rule.over(override({"aten::bmm": CastPolicy.FP32})))
    told = explain_in(region, registry.find("cpu"), "mm")
    assert (told.policy, told.rule, told.rule_name) == (CastPolicy.FP32, "module rule", "encoder.*")
    assert explain_in(region, registry.find("cpu"), "bmm").rule == "region's policy"


def test_layers_of_an_override_stay_few_however_deep_regions_are_nested():
    one, another = override({"aten::mm": CastPolicy.FP32}), override({"aten::mm": CastPolicy.PROMOTE})
    merged = one
    for _ in range(20):
        merged = one.over(another.over(merged))
    assert merged.layers == (one, another)


def test_a_kernel_of_another_library_is_told():
    with torch.library._scoped_library("polycast_test", "FRAGMENT") as library:
        library.define("theirs(Tensor x) -> Tensor")
        library.impl("theirs", lambda x: x.clone(), "AutocastCPU")
        told = explain("polycast_test::theirs", "cpu")
        assert (told.policy, told.rule) == (None, "a kernel that is not polycast's")


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "mps"])
def test_fake_tensors_of_absent_devices_may_be_asked_about(device_type, fake, hand_made):
    hand_made(device_type)
    x = torch.ones(2, 2, device=device_type)
    with polycast.autocast(device_type):
        told = explain("linear", device_type, x, x)
        assert torch.nn.functional.linear(x, x).dtype is told.arguments[0].seen is torch.float16
        assert explain("softmax", device_type, x, 0).policy is CastPolicy.FP32_SET_OPT_DTYPE


def test_a_meta_tensor_stands_for_one_on_the_device():
    with polycast.autocast("cpu"):
        assert [each.seen for each in explain("mm", "cpu", X.to("meta"), X).arguments] == [torch.bfloat16] * 2


def test_a_call_without_a_tensor_on_the_device_is_not_seen():
    told = explain("mm", "xpu", X, X)
    assert (told.reached, str(told).splitlines()[2]) == (
        False,
        "  no tensor is on xpu: autocast for it does not see this call",
    )


def test_it_can_be_written_as_json():
    with polycast.autocast("cpu"):
        assert json.loads(json.dumps(explain("mm", "cpu", X, X.half()).to_dict())) == {
            "op": "aten::mm",
            "device_type": "cpu",
            "enabled": True,
            "dtype": "bfloat16",
            "policy": "lower_precision_fp",
            "rule": "backend's table",
            "rule_name": "",
            "arguments": [
                {"name": "self", "dtype": "float32", "seen": "bfloat16"},
                {"name": "mat2", "dtype": "float16", "seen": "bfloat16"},
            ],
            "reached": True,
            "set_dtype": None,
            "calls": "aten::mm",
            "refusal": None,
            "recipe": "",
            "declined": None,
            "others": [],
        }


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("sofmax", "cpu"), ValueError, "this torch .* has no op 'sofmax'; the nearest are 'softmax'"),
        ((7, "cpu"), TypeError, "expected a name such as 'mm'"),
        (("mm", "meta"), RuntimeError, "No polycast backend is installed for 'meta'"),
        (
            ("bmm", "cpu", X),
            TypeError,
            r"'bmm' does not take these arguments. Its schemas: aten::bmm\(Tensor self, Tensor",
        ),
        (
            (torch.ops.aten.bmm.default, "cpu", X),
            TypeError,
            "'aten::bmm' does not take these arguments. Its schemas: aten",
        ),
        ((torch.ops.aten.bmm.default, "cpu", X, X, X), TypeError, "'aten::bmm' does not take these arguments"),
    ],
    ids=str,
)
def test_what_it_cannot_be_asked(arguments, error, text):
    with pytest.raises(error, match=f"^{text}"):
        explain(*arguments)
    if error is ValueError:
        with pytest.raises(ValueError, match="^policy: .*sofmax"):
            explain("mm", "cpu", policy={"sofmax": "fp32"})


IMAGE, FILTERS = torch.ones(1, 3, 8, 8), torch.ones(2, 3, 3, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "op"),
    [
        ((IMAGE, FILTERS, None, 1), {}, "aten::conv2d"),
        ((IMAGE, FILTERS), {"stride": 1, "padding": 1, "dilation": 2}, "aten::conv2d"),
        ((IMAGE, FILTERS, None, [1, 1], 1), {"groups": 1}, "aten::conv2d"),
        ((IMAGE, FILTERS, None, 1, "same"), {"dilation": 1}, "aten::conv2d.padding"),
    ],
    ids=["stride", "by name", "padding", "padding in words"],
)
def test_a_number_stands_for_a_list_of_a_known_length(args, kwargs, op):
    torch.conv2d(*args, **kwargs)
    with polycast.autocast("cpu"):
        told = explain("conv2d", "cpu", *args, **kwargs)
    assert (told.op, [each.seen for each in told.arguments]) == (op, [torch.bfloat16, torch.bfloat16])


def test_a_number_that_stands_for_no_list_is_refused():
    with pytest.raises(TypeError, match=r"^'conv2d' does not take these arguments\. Its schemas: aten::conv2d"):
        explain("conv2d", "cpu", IMAGE, FILTERS, 1)
    with pytest.raises(TypeError, match=r"^'conv2d' does not take these arguments\. Its schemas: aten::conv2d"):
        explain("conv2d", "cpu", IMAGE, FILTERS, stride=1.0)


def test_a_recipe_is_asked_with_lists_as_the_op_gets_them(monkeypatch):
    asked = []
    monkeypatch.setattr("polycast.engine.low_bit.compute.why_not", lambda *args: asked.append(args[-1]))
    monkeypatch.setattr("polycast.engine.low_bit.compute.why_no_kernel", lambda *args: None)
    with polycast.autocast("cpu", recipe=polycast.Int8(ops=("conv2d",))):
        explain("conv2d", "cpu", IMAGE, FILTERS, stride=1, dilation=2)
    assert list(asked[0])[3:] == [[1, 1], [0, 0], [2, 2], 1]
