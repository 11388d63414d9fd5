"""``polycast explain``: the dtypes of a model's modules from the shell."""

import json

import pytest
from typer.testing import CliRunner

from polycast_plugins.cli import app

SCRIPT = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(2, 8)

def on_meta():
    with torch.device("meta"):
        return build()
"""


@pytest.fixture
def explain(tmp_path, monkeypatch):
    """Return a function that runs the command on a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SCRIPT)
    (tmp_path / "careful.toml").write_text('schema = 1\n[modules]\n"0" = "fp32"\n')
    return lambda *arguments: CliRunner().invoke(app, ["explain", "model.py:build", *arguments])


def compute(result):
    assert result.exit_code == 0, result.output
    return {each["name"]: each["compute"] for each in json.loads(result.stdout)["modules"]}


def test_a_table_is_printed(explain):
    result = explain()
    assert result.exit_code == 0
    assert "In a region of bfloat16 on cpu." in result.stdout
    (row,) = (line.split() for line in result.stdout.splitlines() if "Linear" in line)
    assert row == ["0", "Linear", "float32", "bfloat16", "bfloat16"]


def test_a_dtype_and_a_policy_file_are_used(explain):
    assert compute(explain("--json", "--dtype", "float16")) == {"0": {"float16": 1}, "1": {"float16": 1}}
    assert compute(explain("--json", "--policy", "careful.toml"))["0"] == {"float32": 1}


def test_a_model_on_meta_is_explained_for_the_device_that_it_will_run_on(explain):
    result = CliRunner().invoke(app, ["explain", "model.py:on_meta", "--json", "--device", "cpu"])
    assert compute(result)["0"] == {"bfloat16": 1}


def test_gradients_do_not_prevent_a_recipe(explain):
    declined = json.loads(explain("--json", "--recipe", "int8").stdout)["modules"][0]["declined"]
    assert not any("autograd" in reason for reason in declined.values())


@pytest.mark.parametrize("arguments", [("--dtype", "bf17"), ("--policy", "missing.toml"), ("--recipe", "int9")])
def test_invalid_arguments_are_reported(arguments, explain):
    result = explain(*arguments)
    assert result.exit_code == 2
    assert arguments[1] in result.stderr
