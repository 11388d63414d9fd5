"""``polycast demo`` where nothing can be observed: it measures all the same, and says why there is no report."""

import pytest
from typer.testing import CliRunner

from polycast.cli import app
from polycast.engine import installation
from polycast.engine.native import loading
from polycast.toolchain.cpp_library import BuildError


@pytest.fixture
def no_observer(monkeypatch):
    """Have nothing to observe with, as where there is no compiler."""

    def fails():
        raise BuildError("no C++ compiler is found.")

    monkeypatch.setenv("POLYCAST_ENGINE", "reference")
    installation.forget_choice()
    monkeypatch.setattr(loading, "load", fails)
    yield "polycast.observe needs C++ that cannot be built: no C++ compiler is found."
    installation.forget_choice()


@pytest.mark.slow
def test_command_without_an_observer_measures_and_says_why_there_is_no_report(no_observer, monkeypatch):
    monkeypatch.setattr("polycast.cli.demo.timing.ROUNDS", 2)
    result = CliRunner().invoke(app, ["demo", "--epochs", "3"])
    assert "OK on cpu" in result.stdout
    assert result.stdout.splitlines()[-1] == f"No report: {no_observer}"


def test_a_report_that_was_asked_for_is_refused_without_an_observer(no_observer, tmp_path):
    result = CliRunner().invoke(app, ["demo", "--report", str(tmp_path / "report.html")])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"polycast: {no_observer}\n")
