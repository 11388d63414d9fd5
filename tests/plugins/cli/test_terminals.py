"""Commands print readably in a terminal of 60 columns, and on a stream whose encoding lacks most characters."""

import re

import pytest
from typer.testing import CliRunner

import polycast
from polycast.plugin import manifests
from polycast_plugins.cli import app

MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), (torch.randn(2, 8),)
"""
COMMANDS = [
    ["--help"],
    ["devices", "--all"],
    ["doctor"],
    ["ops", "cpu"],
    ["ops", "cuda", "--explain", "scaled_dot_product_attention"],
    ["ops", "cpu", "--drift"],
    ["explain", "model.py:build"],
    ["profile"],
    ["profile", "--table"],
    ["run", "--help"],
]
WAYS = {"bfloat16": 0.5, "float16": 3.0, "int8": 0.2, "int4": 0.2, "bfloat16_kernel": 0.5, "float32_kernel": 0.8}


@pytest.fixture(autouse=True)
def _with_a_model_and_a_profile(here, profile_of, monkeypatch):
    (here / "model.py").write_text(MODEL)
    profile_of(**WAYS).save(here / "profile.json")
    monkeypatch.setenv("POLYCAST_PROFILE", str(here / "profile.json"))


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


def test_a_profile_that_is_wider_than_the_terminal_is_shown_in_words(in_terminal):
    said = " ".join(in_terminal("profile", "--table"))
    assert re.search(r"linear, 1 row of 4 K: float32 [\d.]+ us, bfloat16 [\d.]+, float16 [\d.]+, int8 ", said)
    assert "-----" not in said


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_line_is_longer_than_the_terminal(in_terminal, command):
    assert [line for line in in_terminal(*command) if len(line) > 60 and " " in line.strip()] == []  # or a long path


def test_doctor_has_a_line_for_each_plugin(in_terminal):
    lines = in_terminal("doctor")
    listed = lines[lines.index("plugins:") + 1 : lines.index("backends:")]
    assert listed == [f"  {each.name} of {each.distribution} {each.version}: ready" for each in manifests()]


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_prints_on_a_stream_of_any_encoding(command, encoding, hand_made):
    reason = polycast.plugin.Availability(False, "no \u2192 driver")
    hand_made("ipu", availability=lambda: reason)
    done = CliRunner(charset=encoding).invoke(app, command)
    assert (done.exit_code, done.exception) == (0, None)
    shows_reasons = command[0] in ("devices", "doctor")
    assert (r"no \u2192 driver" in done.stdout) == shows_reasons
