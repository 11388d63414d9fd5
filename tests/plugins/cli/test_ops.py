"""`polycast ops`: a device's table of ops, where torch's differs from it, and what a region does with an op."""

import json
import re
import sys

import pytest
import torch

import polycast


def test_ops_json_is_the_policy_table_and_the_matched_ops_by_policy_and_name(polycast_command):
    shown = [tuple(entry.values()) for entry in json.loads(polycast_command("ops", "cuda", "--json").stdout)]
    backend = polycast.plugin.get_backend("cuda")
    table = dict.fromkeys(backend.matched_ops, "match")
    table |= {name: policy.value for name, policy in backend.policies.items()}
    order = [policy.value for policy in polycast.CastPolicy]
    assert shown == sorted(table.items(), key=lambda entry: (order.index(entry[1]), entry[0]))


def test_ops_prints_a_line_for_each_op_and_counts_them(polycast_command, hand_made):
    fp32, promote = polycast.CastPolicy.FP32, polycast.CastPolicy.PROMOTE
    backend = hand_made("hpu", policies={"aten::log": fp32, "aten::cat": promote, "aten::exp": fp32})
    lines = polycast_command("ops", "hpu").stdout.splitlines()
    rows = [line.split() for line in lines if "aten::" in line]
    matched = [["aten::lerp.Scalar", "match"]]
    assert [row for row in rows if row[1] != "match" or row in matched] == [
        ["aten::exp", "fp32"],
        ["aten::log", "fp32"],
        ["aten::cat", "promote"],
        *matched,
    ]
    count = len(backend.matched_ops)
    assert lines[-1] == f"hpu: {3 + count} ops (2 fp32, 1 promote, {count} match)"


def test_ops_of_a_device_without_a_backend(polycast_command):
    result = polycast_command("ops", "ipu")
    assert result.stderr.startswith("polycast: No polycast backend is installed for 'ipu'. Backends are installed for:")
    assert result.exit_code == 2


def test_ops_of_a_broken_backend(polycast_command, plugin):
    plugin("acme_wreck", "raise OSError('libacme.so: cannot open')")
    result = polycast_command("ops", "ipu")
    assert result.stderr.startswith("polycast: The backend for 'ipu' is broken: acme_wreck 1.5 (acme_wreck) could")
    assert result.stdout == ""
    assert result.exit_code == 2


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_no_drift(polycast_command, device):
    result = polycast_command("ops", device, "--drift")
    first, *others = result.stdout.splitlines()
    text = f"{device}: no drift between the table and torch {torch.__version__}; the policies of "
    assert re.fullmatch(re.escape(text) + r"(8\d|9\d|1\d\d) ops were compared\.", first)
    said = " differs from torch on purpose: ", ": policies were not compared for ops that cannot be called here: aten::"
    assert [line for line in others if not any(text in line for text in said)] == []
    assert device != "cpu" or others == []
    assert result.exit_code == 0


def test_a_device_for_which_torch_has_no_kernels(polycast_command, hand_made):
    hand_made("hpu", policies={"aten::exp": polycast.CastPolicy.FP32})
    said = f"torch {torch.__version__} has no autocast kernels for hpu: there is nothing to compare with."
    assert polycast_command("ops", "hpu", "--drift").stdout == f"hpu: {said}\n"
    assert json.loads(polycast_command("ops", "hpu", "--drift", "--json").stdout)["torch_autocasts"] is False


@pytest.fixture
def drifted(other_cpu):
    """A backend of cpu whose table differs from torch's in every way, twice on purpose."""
    table = {**polycast.plugin.get_backend("cpu").policies, "aten::mse_loss": polycast.CastPolicy.PROMOTE}
    table |= {"aten::relu": polycast.CastPolicy.FP32, "acme::gone": polycast.CastPolicy.PROMOTE}
    table["aten::linear"] = polycast.CastPolicy.FP32
    del table["aten::mm"], table["aten::bmm"]
    reasons = {"aten::bmm": "the driver does it", "aten::linear": "it is exact", "aten::of_another": "so it is"}
    return other_cpu(policies=table, excluded_ops=reasons)


def test_drift_shows_both_policies_of_each_op(polycast_command, drifted):
    result = polycast_command("ops", "cpu", "--drift")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert [line for line in lines if "::" in line] == [
        "aten::mm - lower_precision_fp torch's own kernel runs",
        "aten::relu fp32 - torch does not autocast it",
        "aten::mse_loss promote fp32 the table's policy is used",
        "acme::gone promote - skipped: this torch lacks the op",
        "cpu: aten::bmm differs from torch on purpose: the driver does it",
        "cpu: aten::linear differs from torch on purpose: it is exact",
    ]
    assert f"cpu: 4 differences between the table and torch {torch.__version__}; the policies of " in result.stdout
    assert result.exit_code == 0


def test_drift_json(polycast_command, drifted):
    found = json.loads(polycast_command("ops", "cpu", "--drift", "--json").stdout)
    polycast.install("cpu")
    assert json.loads(polycast_command("ops", "cpu", "--drift", "--json").stdout) == found
    assert found.pop("compared_policies") > 100
    differences = found.pop("differences")
    assert differences[0]["difference"] == "torch's own kernel runs"
    assert [(each["op"], each["table"], each["torch"]) for each in differences] == [
        ("aten::mm", None, "lower_precision_fp"),
        ("aten::relu", "fp32", None),
        ("aten::mse_loss", "promote", "fp32"),
        ("acme::gone", "promote", None),
    ]
    assert found == {
        "device_type": "cpu",
        "torch": torch.__version__,
        "torch_autocasts": True,
        "problems": [],
        "on_purpose": {"aten::bmm": "the driver does it", "aten::linear": "it is exact"},
    }


def test_ops_are_compared_without_pytest_and_policies_are_not(polycast_command, drifted, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    for name in [name for name in sys.modules if name.startswith("polycast_plugins.testing.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("polycast_plugins.testing.policies_of_torch", raising=False)
    said = polycast_command("ops", "cpu", "--drift").stdout
    assert "cpu: 3 differences between the table and torch " in said
    assert "; the policies of 0 ops were compared.\n" in said
    assert "cpu: policies were not compared. This needs pytest, which comes with polycast[testing]. Install it" in said


# ---- --explain


def test_an_op_is_explained_in_a_region_of_a_device_that_need_not_be_there(polycast_command):
    assert polycast_command("ops", "xpu", "--explain", "softmax").stdout.splitlines() == [
        "aten::softmax.int on xpu, a region of float16",
        "fp32_set_opt_dtype (backend's table): its dtype defaults to float32",
    ]


def test_each_overload_that_a_name_means_is_explained(polycast_command):
    lines = polycast_command("ops", "cuda", "--explain", "aten::pow").stdout.splitlines()
    assert lines[0].startswith("aten::pow.")
    assert [line.partition(": ")[0] for line in lines[2:]] == ["aten::pow.Tensor_Scalar", "aten::pow.Scalar"]


def explained(polycast_command, *arguments):
    return json.loads(polycast_command("ops", *arguments, "--json").stdout)


def test_an_op_is_explained_under_a_policy_file(polycast_command, tmp_path):
    path = tmp_path / "policy.toml"
    polycast.Policy({"mm": "fp32"}, name="careful").save(path)
    found = explained(polycast_command, "cpu", "--explain", "mm.default", "--policy", str(path))
    assert (found["policy"], found["rule"], found["rule_name"]) == ("fp32", "region's policy", "careful")


def test_an_op_is_explained_in_a_region_with_a_recipe(polycast_command):
    linear, exp = (
        explained(polycast_command, "xpu", "--explain", op, "--recipe", "int8:tensor") for op in ("linear", "exp")
    )
    assert (linear["recipe"], exp["recipe"]) == ("int8:tensor", "")
    assert linear["declined"] == "there are no kernels for int8 on xpu"


INVALID = [
    (["--explain", "mm", "--recipe", "int9"], "'int9' is not a recipe: did you mean 'int8'?"),
    (["--recipe", "int8"], "--policy and --recipe need --explain OP."),
    (["--explain", "sofmax"], "has no op 'sofmax'; the nearest are 'softmax', '_softmax', 'fmax'\n"),
    (["--explain", "mm", "--policy", "absent.toml"], "No such file or directory: 'absent.toml'\n"),
    (["--explain", "mm", "--drift"], "--explain is about one op, --drift about all: leave out one of the two."),
    (["--policy", "absent.toml"], "--policy and --recipe need --explain OP."),
]


def test_invalid_arguments_are_refused(polycast_command, monkeypatch, subtests):
    monkeypatch.setenv("COLUMNS", "200")
    for arguments, said in INVALID:
        with subtests.test(arguments=arguments, said=said):
            result = polycast_command("ops", "cpu", *arguments)
            assert said in result.stderr
            assert (result.stdout, result.exit_code) == ("", 2)


NEAREST = {
    "softmx": "softmax",
    "batchnorm": "batch_norm",
    "mat_mul": "matmul",
    "attention": "scaled_dot_product_attention",
}


@pytest.mark.parametrize("wrong", NEAREST)
def test_an_unknown_op_suggests_the_one_that_was_meant(polycast_command, wrong):
    said = polycast_command("ops", "cpu", "--explain", wrong).stderr
    assert re.search(rf"has no op '{wrong}'; the nearest are .*'{NEAREST[wrong]}'", said)
