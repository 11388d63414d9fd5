"""The results of explain_op, their texts, and its errors; what it says against what the engines do."""

import json
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.rounding import Rounded

import polycast
from polycast import CastPolicy, Policy
from polycast.engine.override import make_override
from polycast.plugin import explain_op

X = torch.ones(2, 2)


def explain(op, *args, device_type="cpu", policy=None, **kwargs):
    return explain_op(op, device_type, args, kwargs, policy)


def lines(*args, **options):
    return str(explain(*args, **options)).splitlines()


def test_the_text_names_the_policy_the_rule_and_the_casts():
    with polycast.autocast("cpu", policy=Policy({"softmax": "fp32"}, name="careful")):
        assert lines("softmax", X.bfloat16(), 0) == [
            "aten::softmax.int on cpu, a region of bfloat16",
            "fp32 (region's policy 'careful'): its inputs are cast to float32",
            "  self: bfloat16 -> float32",
        ]
        assert lines("cat", [X, X])[1:] == [
            "promote (backend's table): its inputs are cast to float32 if their dtypes differ",
            "  tensors[0]: float32, unchanged",
            "  tensors[1]: float32, unchanged",
        ]
        assert lines("relu", X)[1] == ("no policy (none): it runs unchanged, and autocast applies to its inner ops")


def test_matched_operands_are_explained_in_text_html_and_data():
    half, wide, index = torch.zeros(2, dtype=torch.float16), torch.zeros(2), torch.arange(2)
    with polycast.autocast("cpu"):
        written = polycast.explain("index_add_", half, 0, index, wide, device_type="cpu")
        equal = polycast.explain("index_add_", half, 0, index, half, device_type="cpu")
    lines = [
        "match (mixed dtypes): its inputs are cast where torch would refuse their dtypes",
        "  self: float16, unchanged",
        "  index: int64, unchanged",
    ]
    assert str(written).splitlines()[1:] == [*lines, "  source: float32 -> float16"]
    assert str(equal).splitlines()[1:] == [*lines, "  source: float16, unchanged"]
    assert "<p>source: float32 -&gt; float16</p>" in written._repr_html_()
    assert written.to_dict()["arguments"][-1] == {"name": "source", "dtype": "float32", "seen": "float16"}


def test_outside_a_region_it_explains_what_a_region_would_do():
    assert lines("mm", X, X) == [
        "aten::mm on cpu, autocast is off",
        "lower_precision_fp (backend's table): its inputs are cast to bfloat16, in a region",
        "  self: float32, unchanged",
        "  mat2: float32, unchanged",
    ]


def test_a_banned_op_is_explained_with_its_error():
    with polycast.autocast("cpu", policy={"mm": "banned"}):
        found = explain("mm", X, X)
        with pytest.raises(RuntimeError, match=f"^{re.escape(found.refusal)}"):
            torch.mm(X, X)
    assert str(found).splitlines()[2] == f"  RuntimeError: {found.refusal}"


def test_an_added_dtype_and_a_replaced_overload_are_explained():
    with polycast.autocast("cpu", policy={"sum": "fp32_set_opt_dtype", "norm": "fp32_append_dtype"}):
        total, norm = lines("sum", X.half()), lines("norm", X.half(), 2)
    assert total[2:] == ["  self: float16, unchanged", "  dtype: float32 is given"]
    assert norm[2:] == [*total[2:], "  aten::norm.ScalarOpt_dtype is called"]


def test_without_arguments_all_overloads_are_explained_those_with_a_policy_first():
    with polycast.autocast("cpu", policy={"norm": "fp32_append_dtype"}):
        found = explain("norm")
    assert [(each.op, each.policy is not None) for each in (found, *found.others)] == [
        ("aten::norm.Scalar", True),
        ("aten::norm.ScalarOpt_dim", True),
        ("aten::norm.ScalarOpt_dim_dtype", False),
        ("aten::norm.ScalarOpt_dtype", False),
    ]
    assert len(str(found).splitlines()) == 5


def test_the_inner_region_decides_and_is_named():
    with polycast.autocast("cpu", policy=Policy({"mm": "fp32", "bmm": "fp32"}, name="outer")):
        with polycast.autocast("cpu", policy=Policy({"mm": "promote"}, name="inner")):
            assert explain("mm").rule_name == "inner"
            assert explain("bmm").rule_name == "outer"
            assert explain("bmm", policy=Policy({"bmm": "promote"}, name="asked")).rule_name == "asked"
            snapshot = polycast.capture()
        assert explain("mm").rule_name == "outer"
    with snapshot.apply():
        assert explain("mm").rule_name == "inner"


def test_the_layers_of_an_override_do_not_grow_with_nesting():
    one, another = (
        make_override("cpu", frozenset({("aten::mm", policy)}), "region's policy", "", None, None)
        for policy in (CastPolicy.FP32, CastPolicy.PROMOTE)
    )
    merged = one
    for _ in range(20):
        merged = one.over(another.over(merged))
    assert merged.layers == (one, another)


def test_a_kernel_of_another_library_is_explained(define):
    define("theirs(Tensor x) -> Tensor").impl("theirs", lambda x: x.clone(), "AutocastCPU")
    found = explain("polycast_test::theirs")
    assert (found.policy, found.rule) == (None, "a kernel that is not polycast's")


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "mps"])
def test_fake_tensors_of_absent_devices_are_explained(device_type, fake, hand_made):
    hand_made(device_type)
    x = torch.ones(2, 2, device=device_type)
    with polycast.autocast(device_type):
        found = explain("linear", x, x, device_type=device_type)
        assert torch.nn.functional.linear(x, x).dtype is found.arguments[0].seen is torch.float16
        assert explain("softmax", x, 0, device_type=device_type).policy is CastPolicy.FP32_SET_OPT_DTYPE


def test_a_meta_tensor_counts_as_one_on_the_device():
    with polycast.autocast("cpu"):
        assert [each.seen for each in explain("mm", X.to("meta"), X).arguments] == [torch.bfloat16] * 2


def test_a_call_without_a_tensor_on_the_device_is_not_seen():
    found = explain("mm", X, X, device_type="xpu")
    assert (found.reached, str(found).splitlines()[2]) == (
        False,
        "  no tensor is on xpu: autocast for it does not see this call",
    )


def test_an_explanation_converts_to_json():
    with polycast.autocast("cpu"):
        assert json.loads(json.dumps(explain("mm", X, X.half()).to_dict())) == {
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
            "way": "",
            "reason": "",
            "others": [],
            "package": "",
        }


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
def test_a_number_is_accepted_for_a_list_of_known_length(args, kwargs, op):
    torch.conv2d(*args, **kwargs)
    with polycast.autocast("cpu"):
        found = explain("conv2d", *args, **kwargs)
    assert (found.op, [each.seen for each in found.arguments]) == (op, [torch.bfloat16, torch.bfloat16])


BMM = torch.ops.aten.bmm.default
BAD = [
    (lambda: explain("sofmax"), ValueError, "this torch .* has no op 'sofmax'; the nearest are 'softmax'"),
    (lambda: explain("mm", policy={"sofmax": "fp32"}), ValueError, "policy: .*sofmax"),
    (lambda: explain(7), TypeError, "expected a name such as 'mm'"),
    (
        lambda: explain("bmm", X),
        TypeError,
        r"'bmm' does not take these arguments. Its schemas: aten::bmm\(Tensor self,",
    ),
    (lambda: explain(BMM, X), TypeError, "'aten::bmm' does not take these arguments. Its schemas: aten"),
    (lambda: explain(BMM, X, X, X), TypeError, "'aten::bmm' does not take these arguments"),
    (lambda: explain("conv2d", IMAGE, FILTERS, 1), TypeError, "'conv2d' does not take .* Its schemas: aten::conv2d"),
    (lambda: explain("conv2d", IMAGE, FILTERS, stride=1.0), TypeError, "'conv2d' does not take .*: aten::conv2d"),
    (lambda: explain("mm", device_type="meta"), RuntimeError, "No polycast backend is installed for 'meta'"),
]


def test_bad_arguments_raise_errors(subtests):
    for call, error, text in BAD:
        with subtests.test(text=text), pytest.raises(error, match=f"^{text}"):
            call()


def test_a_recipe_gets_lists_as_the_op_does(monkeypatch, int8_kernels):
    asked = []
    plan = "tests.core.rounding.RoundedPlan"
    monkeypatch.setattr(f"{plan}.explain", lambda *args: asked.append(args[2]) or "")
    monkeypatch.setattr(f"{plan}.why_no_kernel", lambda *args: None)
    with polycast.autocast("cpu", recipe=Rounded(ops=("conv2d",))):
        explain("conv2d", IMAGE, FILTERS, stride=1, dilation=2)
    assert list(asked[0])[3:] == [[1, 1], [0, 0], [2, 2], 1]


def test_decide_returns_the_policy_and_its_rule():
    with polycast.autocast("cpu"):
        decided = [polycast.plugin.decide(op, "cpu") for op in ("aten::mm", "aten::relu")]
    assert decided == [(CastPolicy.LOWER_PRECISION_FP, "backend's table", ""), (None, "none", "")]


SEEN = []
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64]
TENSORS = st.sampled_from(DTYPES).map(lambda dtype: torch.ones(2, dtype=dtype))


@pytest.fixture
def op(define):
    """An op with every kind of argument, whose kernel notes the dtypes that it sees."""

    def kernel(a, b, c, d, e=1.0, *, dtype=None):
        SEEN[:] = [*(tensor.dtype for tensor in [a, b, *c, *d] if tensor is not None), dtype]
        return a.clone()

    schema = "all(Tensor a, Tensor? b, Tensor[] c, Tensor?[] d, float e=1.0, *, ScalarType? dtype=None) -> Tensor"
    define(schema, kernel=kernel)


@pytest.mark.usefixtures("engine", "op")
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
def test_the_explained_dtypes_are_those_that_the_kernel_sees(arguments, dtype, policy, enabled):
    with polycast.autocast("cpu", enabled=enabled, policy={"polycast_test::all": policy}):
        explained = explain_op("polycast_test::all", "cpu", arguments, dtype)
        torch.ops.polycast_test.all(*arguments, **dtype)
    assert [*(argument.seen for argument in explained.arguments), explained.set_dtype or dtype.get("dtype")] == SEEN
