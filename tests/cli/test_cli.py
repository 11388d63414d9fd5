"""The command line as a whole: its help, its modules, and how it fails."""

import importlib.metadata
import json
import subprocess
import sys

import pytest


def test_version(polycast_command):
    result = polycast_command("--version")
    assert result.stdout == f"polycast {importlib.metadata.version('polycast')}\n"
    assert result.exit_code == 0


def test_help_names_every_command(polycast_command):
    words = polycast_command("--help").stdout.split()
    assert {"devices", "ops", "build", "demo", "doctor", "run"} <= set(words)


@pytest.mark.slow
def test_module_runs_as_a_command():
    command = [sys.executable, "-m", "polycast", "ops", "cpu", "--policy", "promote", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {entry["policy"] for entry in json.loads(result.stdout)} == {"promote"}


@pytest.mark.slow
def test_module_reports_an_error_without_a_traceback():
    command = [sys.executable, "-m", "polycast", "ops", "not a real device"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr.startswith(
        "polycast: Invalid device string: 'not a real device'. Backends are installed for: "
    )
    assert result.stdout == ""
    assert result.returncode == 2


@pytest.mark.slow
def test_importing_polycast_does_not_import_what_only_the_command_line_needs():
    code = "import polycast, sys; print(sorted({'rich', 'typer', 'sklearn', 'polycast.cli'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("command", [["devices"], ["ops", "cpu"], ["demo"]], ids=lambda words: words[0])
@pytest.mark.parametrize("variable", ["POLYCAST_DISCOVERY", "POLYCAST_BLOCK", "POLYCAST_PROVIDER", "POLYCAST_ENGINE"])
def test_variable_with_an_illegal_value(polycast_command, monkeypatch, rediscover, command, variable):
    monkeypatch.setenv(variable, "perhaps,")
    result = polycast_command(*command)
    assert result.stderr.startswith(f"polycast: {variable}='perhaps,' is not legal: expected ")
    assert result.exit_code == 2
