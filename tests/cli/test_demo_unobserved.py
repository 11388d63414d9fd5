"""``polycast demo`` on the reference engine, which cannot be observed."""

import pytest
from typer.testing import CliRunner

from polycast.cli import app
from polycast.engine import installation

REASON = (
    "polycast.observe needs the native engine, and this process runs on the reference engine, which cannot be "
    "observed: POLYCAST_ENGINE=reference. Unset it."
)


@pytest.fixture(autouse=True)
def _reference_engine(monkeypatch):
    monkeypatch.setenv("POLYCAST_ENGINE", "reference")
    installation.forget_choice()
    yield
    installation.forget_choice()


@pytest.mark.slow
def test_the_demo_measures_and_prints_why_there_is_no_report(monkeypatch):
    monkeypatch.setattr("polycast.cli.demo.inference_timing.ROUNDS", 2)
    result = CliRunner().invoke(app, ["demo", "--epochs", "1"])
    assert "OK on cpu: every run is at least 90% accurate" in result.stdout
    assert result.stdout.splitlines()[-1] == f"No report: {REASON}"


def test_a_requested_report_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--report", str(tmp_path / "report.html")])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"polycast: {REASON}\n")


@pytest.mark.parametrize("option", ["--observe", "--report=out.html"])
def test_run_refuses_to_observe(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("print('it ran')")
    result = CliRunner().invoke(app, ["run", option, "program.py"])  # would raise Ready
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"polycast: {REASON}\n")
