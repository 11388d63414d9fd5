"""The command line as a whole: its help, its modules, and how it fails."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from polycast_plugins.cli import app, check_output


def test_version(polycast_command):
    result = polycast_command("--version")
    assert result.stdout == f"polycast {importlib.metadata.version('polycast')}\n"
    assert result.exit_code == 0


COMMANDS = get_command(app).commands
PARAMETERS = [(name, each) for name, command in COMMANDS.items() for each in command.params]


def test_help_shows_no_type_after_a_flag(polycast_command, subtests):
    for command in ["", *COMMANDS]:
        with subtests.test(command=command):
            shown = polycast_command(*command.split(), "--help").stdout
            assert [word for word in ("--help", "bool", "BOOLEAN") if word in shown] == ["--help"]


def test_help_of_a_parameter_is_a_sentence():
    assert [(name, each.help) for name, each in PARAMETERS if not re.fullmatch(r"[A-Z].* .*\.", each.help)] == []


def test_policy_is_a_policy_file_in_every_command():
    meanings = {command: each.metavar for command, each in PARAMETERS if "--policy" in each.opts}
    assert meanings == {"explain": "FILE", "ops": "FILE", "run": "FILE"}


def test_help_reflows_its_paragraphs(polycast_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = polycast_command("build", "--help").stdout
    assert "again. If one cannot be imported or compiled, the others still are" in shown


@pytest.mark.slow
def test_module_reports_an_error_without_a_traceback():
    command = [sys.executable, "-m", "polycast", "ops", "not a real device"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    said = "polycast: Invalid device string: 'not a real device'. Backends are installed for: "
    assert result.stderr.startswith(said)
    assert (result.stdout, result.returncode) == ("", 2)


@pytest.mark.slow
def test_importing_polycast_does_not_import_what_only_the_command_line_needs():
    code = "import polycast, sys; print(sorted({'rich', 'typer', 'sklearn', 'polycast_plugins'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("command", [["devices"], ["ops", "cpu"]], ids=lambda words: words[0])
@pytest.mark.parametrize("variable", ["POLYCAST_DISCOVERY", "POLYCAST_BLOCK", "POLYCAST_PROVIDER", "POLYCAST_ENGINE"])
def test_an_invalid_variable_is_an_error(polycast_command, monkeypatch, rediscover, command, variable):
    monkeypatch.setenv(variable, "perhaps,")
    result = polycast_command(*command)
    assert result.stderr.startswith(f"polycast: {variable}='perhaps,' is invalid: expected ")
    assert result.exit_code == 2


def test_check_output_leaves_a_writable_file_unchanged(tmp_path):
    (tmp_path / "there.html").write_text("old")
    check_output(tmp_path / "there.html")
    check_output(tmp_path / "new.html")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"there.html": "old"}


REFUSED = {
    "missing/report.html": "{0}/missing/report.html cannot be written: {0}/missing does not exist. Create it, or",
    "file/report.html": "{0}/file/report.html cannot be written: {0}/file is not a folder. Create it, or choose",
    "folder": "{0}/folder is a folder: name a file in it, such as {0}/folder/report.html.",
    "/proc/report.html": "/proc/report.html cannot be written: ",
}


@pytest.mark.parametrize("path", REFUSED)
def test_check_output_refuses_unwritable_paths(tmp_path, path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    if path.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("there is no /proc here, which nobody can make files in")
    with pytest.raises(ValueError, match="^" + re.escape(REFUSED[path].format(tmp_path))):
        check_output(tmp_path / path)
