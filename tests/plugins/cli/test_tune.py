"""``polycast tune``: the search from the shell."""

import sys
from pathlib import Path

import pytest
import torch
from tests.plugins.precision.conftest import int8_in_python  # noqa: F401  # a fixture
from typer.testing import CliRunner

import polycast
from polycast_plugins.cli import app

SCRIPT = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    with torch.no_grad():
        model[2].weight.mul_(1e6)
        model[3].weight.mul_(1e-6)
    return model, torch.randn(4, 8)


def outliers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.Linear(256, 256))
    with torch.no_grad():
        model[0].weight[:2] *= 3000
        model[1].weight[:, :2] /= 3000
    return model, torch.randn(4, 256)


def with_metric():
    return *build(), lambda output, reference: 1.0


def interrupted():
    calls = []

    def metric(output, reference):
        calls.append(output)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return (output - reference).norm() / reference.norm()

    return *build(), metric


def batches():
    model, x = build()
    return model, [x, x * 0.5, x * 0.25], None, lambda output: output.float().square().mean()


def only_a_model():
    return build()[0]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "script", raising=False)
    return lambda function, *arguments: CliRunner().invoke(app, ["tune", function, *arguments])


TO_FILE = ("--output", "policy.toml")
FLOAT16 = ("--dtype", "float16")


def written():
    return polycast.Policy.load("policy.toml").modules


def test_the_policy_is_written_with_its_evidence_each_time(run):
    result, again = run("script.py:build", *FLOAT16), run("script.py:build", *FLOAT16)
    assert (result.exit_code, result.stderr) == (0, "")
    Path("policy.toml").write_text(result.stdout)
    assert written() == {"2": "fp32", "3": "fp32"}
    assert "# relative L2 error 0.000" in result.stdout
    assert again.stdout == result.stdout
    assert torch.is_grad_enabled()


def test_the_policy_is_written_to_a_file_and_the_evidence_printed(run):
    lines = run("script.py:build", *FLOAT16, *TO_FILE).stdout.splitlines()
    assert lines[0] == "Sequential on cpu, float16: 2 of 7 modules in float32"
    assert lines[-1] == "written: policy.toml"
    assert written() == {"2": "fp32", "3": "fp32"}


@pytest.mark.usefixtures("int8_in_python")
def test_modules_that_must_leave_a_recipe_are_found(run):
    result = run("script.py:outliers", "--recipe", "int8", "--tolerance", "0.02", *TO_FILE)
    assert (result.exit_code, result.stderr) == (0, "")
    first = result.stdout.splitlines()[0]
    assert first == "Sequential on cpu, bfloat16, int8: 0 of 4 modules in float32, 1 kept in bfloat16"
    assert written() == {"": polycast.Int8(), "1": polycast.NoRecipe()}


def test_the_exit_status_is_1_if_the_tolerance_is_not_met(run):
    result = run("script.py:with_metric", "--tolerance", "0.5")
    assert (result.exit_code, result.stderr) == (
        1,
        "polycast: no policy keeps the tolerance: with all modules in float32 the distance is 1. The closest policy is "
        "written.\n",
    )
    assert "NOT within the tolerance of 0.5" in result.stdout


def test_an_interrupted_search_writes_nothing(run):
    result = run("script.py:interrupted", *FLOAT16, *TO_FILE)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "polycast: interrupted\n")
    assert not Path("policy.toml").exists()


def test_it_searches_over_batches_with_a_loss(run):
    result = run("script.py:batches", *FLOAT16, *TO_FILE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "relative L2 error of output or gradients" in result.stdout
    assert "(worst of 3 batches), within the tolerance of 0.01; " in result.stdout
    assert set(written()) == {"2", "3"}


INVALID = [
    (["script.py"], "expected a file and a function in it, such as model.py:build"),
    (["other.py:build"], "there is no file 'other.py'"),
    (["script.py:other"], "has no function 'other'"),
    (["script.py:only_a_model"], "returned Sequential. It must return (model, data), (model, data, metric) or"),
    (["script.py:build", "--dtype", "float17"], "'float17' is not a dtype"),
    (["script.py:build", "--recipe", "int9"], "'int9' is not a recipe: did you mean 'int8'?"),
    # Before the search, which `interrupted` would end:
    (["script.py:interrupted", "--output", "nowhere/policy.toml"], "policy.toml cannot be written: nowhere does not"),
    (["script.py:interrupted", "--output", "."], ". is a folder: name a file in it, such as policy.toml"),
]


def test_invalid_arguments_are_refused(run, subtests):
    for arguments, problem in INVALID:
        with subtests.test(arguments=arguments, problem=problem):
            result = run(*arguments)
            assert result.exit_code == 2
            assert problem in " ".join(result.stderr.replace("│", "").split())
