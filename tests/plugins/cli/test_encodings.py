"""What the commands print on a stream whose encoding lacks most characters."""

import pytest
from typer.testing import CliRunner

import polycast
from polycast_plugins.cli import app

COMMANDS = [
    ["--help"],
    ["devices", "--all"],
    ["doctor"],
    ["ops", "cpu"],
    ["ops", "cpu", "--explain", "softmax"],
    ["profile"],
    ["run", "--help"],
]


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_prints_on_a_stream_of_any_encoding(command, encoding, profile_of, hand_made, tmp_path, monkeypatch):
    profile_of(bfloat16=0.5).save(tmp_path / "profile.json")
    monkeypatch.setenv("POLYCAST_PROFILE", str(tmp_path / "profile.json"))
    reason = polycast.plugin.Availability(False, "no \u2192 driver")
    hand_made("ipu", availability=lambda: reason)
    done = CliRunner(charset=encoding).invoke(app, command)
    assert (done.exit_code, done.exception) == (0, None)
    shows_reasons = command[0] in ("devices", "doctor")
    assert (r"no \u2192 driver" in done.stdout) == shows_reasons
