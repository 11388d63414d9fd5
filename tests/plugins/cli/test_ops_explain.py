"""``polycast ops DEVICE --explain OP``, and names on the command line."""

import json

from typer.testing import CliRunner

from polycast import Policy
from polycast_plugins.cli import app


def call(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_an_op_is_explained_in_a_region_of_a_device_that_need_not_be_there():
    assert call("ops", "xpu", "--explain", "softmax").stdout.splitlines() == [
        "aten::softmax.int on xpu, a region of float16",
        "fp32_set_opt_dtype (backend's table): its dtype defaults to float32",
    ]


def test_each_overload_that_a_name_means_is_explained():
    lines = call("ops", "cuda", "--explain", "aten::pow").stdout.splitlines()
    assert lines[0].startswith("aten::pow.")
    assert [line.partition(": ")[0] for line in lines[2:]] == ["aten::pow.Tensor_Scalar", "aten::pow.Scalar"]


def test_an_op_is_explained_under_a_policy_file(tmp_path):
    path = tmp_path / "policy.toml"
    Policy({"mm": "fp32"}, name="careful").save(path)
    explained = json.loads(call("ops", "cpu", "--explain", "mm.default", "--policy", str(path), "--json").stdout)
    assert (explained["policy"], explained["rule"], explained["rule_name"]) == ("fp32", "region's policy", "careful")


def test_an_op_is_explained_in_a_region_with_a_recipe():
    explained = [
        json.loads(call("ops", "xpu", "--explain", op, "--recipe", "int8:tensor", "--json").stdout)
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
    (
        ["--explain", "mm", "--cast-policy", "fp32"],
        "--explain is about one op: leave out --cast-policy and --drift.",
    ),
    (
        ["--policy", "absent.toml"],
        "--policy FILE needs --explain OP. To see the ops with one cast policy, write --cast-policy NAME.",
    ),
]


def test_invalid_arguments_are_refused(subtests):
    for arguments, said in INVALID:
        with subtests.test(arguments=arguments, said=said):
            result = call("ops", "cpu", *arguments)
            assert said in result.stderr
            assert (result.stdout, result.exit_code) == ("", 2)
