"""What the commands print in a terminal of 60 columns."""

import re

import pytest
from typer.testing import CliRunner

from polycast_plugins.cli import app

MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), (torch.randn(2, 8),)
"""


@pytest.fixture
def in_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*arguments):
        said = re.sub("\x1b\\[[0-9;]*m", "", CliRunner().invoke(app, arguments).stdout)
        assert said
        return said.splitlines()

    return call


@pytest.fixture
def kept_profile(profile_of, tmp_path, monkeypatch):
    ways = {"bfloat16": 0.5, "float16": 3.0, "int8": 0.2, "int4": 0.2, "bfloat16_kernel": 0.5, "float32_kernel": 0.8}
    profile_of(**ways).save(tmp_path / "profile.json")
    monkeypatch.setenv("POLYCAST_PROFILE", str(tmp_path / "profile.json"))


def test_a_profile_that_is_wider_than_the_terminal_is_shown_in_words(in_terminal, kept_profile):
    said = " ".join(in_terminal("profile", "--table"))
    assert re.search(r"linear, 1 row of 4 K: float32 [\d.]+ us, bfloat16 [\d.]+, float16 [\d.]+, int8 ", said)
    assert "-----" not in said


@pytest.mark.parametrize(
    "command",
    [
        ["devices", "--all"],
        ["doctor"],
        ["ops", "cpu"],
        ["ops", "cuda", "--explain", "scaled_dot_product_attention"],
        ["ops", "cpu", "--drift"],
        ["explain", "model.py:build"],
        ["profile"],
        ["profile", "--table"],
        ["run", "--help"],
    ],
    ids=" ".join,
)
def test_no_line_is_longer_than_the_terminal(in_terminal, kept_profile, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    assert [line for line in in_terminal(*command) if len(line) > 60] == []
