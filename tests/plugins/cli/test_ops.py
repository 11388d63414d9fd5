"""`polycast ops`: a device's table of ops, where torch's differs from it, and what a region does with an op."""

import json
import re

import pytest
import torch

import polycast
from polycast.engine.installation import torch_ops


def test_ops_json_is_the_policy_table_and_the_matched_ops(polycast_command):
    shown = json.loads(polycast_command("ops", "cuda", "--json").stdout)
    backend = polycast.plugin.get_backend("cuda")
    table = dict.fromkeys(backend.matched_ops, "match")
    table |= {name: policy.value for name, policy in backend.policies.items()}
    assert {entry["op"]: entry["policy"] for entry in shown} == table


def test_ops_are_grouped_by_policy_and_sorted_in_it(polycast_command):
    shown = [tuple(entry.values()) for entry in json.loads(polycast_command("ops", "cpu", "--json").stdout)]
    order = [policy.value for policy in polycast.CastPolicy]
    assert shown == sorted(shown, key=lambda entry: (order.index(entry[1]), entry[0]))


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


@pytest.mark.parametrize("policy", ["promote", "PROMOTE"])
def test_ops_of_one_policy(polycast_command, policy):
    shown = json.loads(polycast_command("ops", "cpu", "--cast-policy", policy, "--json").stdout)
    assert [entry["op"] for entry in shown] == ["aten::cat", "aten::index_copy", "aten::stack"]


def test_ops_of_a_policy_that_no_op_has(polycast_command):
    assert polycast_command("ops", "cpu", "--cast-policy", "banned").stdout == "cpu: 0 ops\n"


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


def test_no_drift(polycast_command, hand_made):
    ops = torch_ops("cpu")
    hand_made("cpu", policies=dict.fromkeys(ops, polycast.CastPolicy.PASSTHROUGH))
    result = polycast_command("ops", "cpu", "--drift")
    assert result.stdout == f"cpu: no drift. The table and torch {torch.__version__} have the same {len(ops)} ops.\n"
    assert result.exit_code == 0


def test_an_excluded_op_is_not_drift(polycast_command, hand_made):
    table = dict.fromkeys(torch_ops("cpu") - {"aten::mm"}, polycast.CastPolicy.PASSTHROUGH)
    hand_made("cpu", policies=table, excluded_ops={"aten::mm": "the driver does it", "aten::of_another": "so it is"})
    first, *left = polycast_command("ops", "cpu", "--drift").stdout.splitlines()
    assert first == f"cpu: no drift. The table and torch {torch.__version__} have the same {len(table)} ops."
    assert left == ["cpu: aten::mm runs torch's own kernel on purpose: the driver does it"]


@pytest.fixture
def drifted(hand_made):
    """A backend of cpu that lacks an op that torch treats, has one that torch leaves alone, and one that is no op."""
    table = dict.fromkeys(torch_ops("cpu") - {"aten::mm"}, polycast.CastPolicy.PASSTHROUGH)
    table |= {"aten::relu": polycast.CastPolicy.FP32, "acme::gone": polycast.CastPolicy.PROMOTE}
    del table["aten::bmm"]
    return hand_made("cpu", policies=table, excluded_ops={"aten::bmm": "the driver does it"})


def test_drift_shows_both_policies_of_each_op(polycast_command, drifted):
    result = polycast_command("ops", "cpu", "--drift")
    lines = result.stdout.splitlines()
    assert [" ".join(line.split()) for line in lines if "::" in line] == [
        "aten::mm - only in torch: torch's own kernel runs",
        "aten::relu fp32 only in the table: torch does not autocast it",
        "acme::gone promote this torch lacks the op: skipped",
        "cpu: aten::bmm runs torch's own kernel on purpose: the driver does it",
    ]
    assert lines[-2] == (
        f"cpu: the table differs from torch {torch.__version__}: 1 ops only in torch, 1 only in the table, 1 skipped."
    )
    assert result.exit_code == 0


def test_drift_json(polycast_command, drifted):
    assert json.loads(polycast_command("ops", "cpu", "--drift", "--json").stdout) == {
        "device_type": "cpu",
        "torch": torch.__version__,
        "only_in_torch": ["aten::mm"],
        "only_in_table": ["aten::relu"],
        "skipped": ["acme::gone"],
        "excluded_ops": {"aten::bmm": "the driver does it"},
    }


def test_drift_is_the_same_while_kernels_are_installed(polycast_command, drifted):
    before = polycast_command("ops", "cpu", "--drift", "--json").stdout
    polycast.install("cpu")
    assert polycast_command("ops", "cpu", "--drift", "--json").stdout == before


def test_drift_of_one_policy_is_refused(polycast_command):
    result = polycast_command("ops", "cpu", "--drift", "--cast-policy", "fp32")
    assert "--cast-policy and --drift exclude each other" in result.stderr
    assert result.exit_code == 2


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


def test_an_op_is_explained_under_a_policy_file(polycast_command, tmp_path):
    path = tmp_path / "policy.toml"
    polycast.Policy({"mm": "fp32"}, name="careful").save(path)
    explained = json.loads(
        polycast_command("ops", "cpu", "--explain", "mm.default", "--policy", str(path), "--json").stdout
    )
    assert (explained["policy"], explained["rule"], explained["rule_name"]) == ("fp32", "region's policy", "careful")


def test_an_op_is_explained_in_a_region_with_a_recipe(polycast_command):
    explained = [
        json.loads(polycast_command("ops", "xpu", "--explain", op, "--recipe", "int8:tensor", "--json").stdout)
        for op in ("linear", "exp")
    ]
    assert [each["recipe"] for each in explained] == ["int8:tensor", ""]
    assert explained[0]["declined"] == "there are no kernels for int8 on xpu"


INVALID = [
    (["--explain", "mm", "--recipe", "int9"], "'int9' is not a recipe: did you mean 'int8'?"),
    (["--recipe", "int8"], "--recipe needs --explain OP."),
    (["--explain", "sofmax"], "has no op 'sofmax'; the nearest are 'softmax', '_softmax', 'fmax'\n"),
    (["--cast-policy", "fp23"], "'fp23' is not one of 'lower_precision_fp', 'fp32', "),
    (["--explain", "mm", "--policy", "absent.toml"], "No such file or directory: 'absent.toml'\n"),
    (["--explain", "mm", "--drift"], "--explain is about one op: leave out --cast-policy and --drift."),
    (["--explain", "mm", "--cast-policy", "fp32"], "--explain is about one op: leave out --cast-policy and --drift."),
    (
        ["--policy", "absent.toml"],
        "--policy FILE needs --explain OP. To see the ops with one cast policy, write --cast-policy NAME.",
    ),
]


def test_invalid_arguments_are_refused(polycast_command, monkeypatch, subtests):
    monkeypatch.setenv("COLUMNS", "200")
    for arguments, said in INVALID:
        with subtests.test(arguments=arguments, said=said):
            result = polycast_command("ops", "cpu", *arguments)
            assert said in result.stderr
            assert (result.stdout, result.exit_code) == ("", 2)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("softmx", "softmax"),
        ("batchnorm", "batch_norm"),
        ("mat_mul", "matmul"),
        ("attention", "scaled_dot_product_attention"),
    ],
)
def test_an_unknown_op_suggests_the_one_that_was_meant(polycast_command, wrong, nearest):
    said = polycast_command("ops", "cpu", "--explain", wrong).stderr
    assert re.search(rf"has no op '{wrong}'; the nearest are .*'{nearest}'", said)
