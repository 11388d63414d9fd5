"""The demo command: the checks of its result, what it prints, and its errors."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from polycast.cli.demo.inference_timing import Timing
from polycast.cli.demo.report import conclusion
from polycast.cli.demo.result_checks import DemoResult, problems
from typer.testing import CliRunner

import polycast
from polycast.cli import app, demo
from polycast.cli.demo.training import FLOAT32, INT8, MODES, TORCH, DemoRun
from polycast.observer.facts import Facts
from polycast.observer.records import LowBit
from polycast.registry.registry import registry

pytest.importorskip("sklearn", reason="the demo's digits are scikit-learn's")

AUTOCAST_DTYPES = {"conv1": "bfloat16", "loss": "float32"}
GOOD = DemoResult(
    "cpu",
    torch.bfloat16,
    {
        "float32": DemoRun("float32", 0.98, 0.021, {"conv1": "float32", "loss": "float32"}),
        "torch.autocast": DemoRun("torch.autocast", 0.97, 0.02, AUTOCAST_DTYPES),
        "polycast.autocast": DemoRun("polycast.autocast", 0.97, 0.02, AUTOCAST_DTYPES),
    },
    Timing(({"float32": 0.1, "torch.autocast": 0.2, "polycast.autocast": 0.15},)),
    polycast.Observation(Facts()),
)


def with_run(mode, **changes):
    """Return the good result with the run of one mode changed."""
    return replace(GOOD, runs={**GOOD.runs, mode: replace(GOOD.runs[mode], **changes)})


@pytest.fixture(autouse=True)
def _temporary_files(tmp_path, monkeypatch):
    """Make the command write its report in a folder of the test, unless it is given a path."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run_demo(*arguments):
    return CliRunner().invoke(app, ["demo", *arguments])


def timed(float32, torchs, polycasts, **others):
    """Return a result with these seconds."""
    rounds = ({"float32": float32, "torch.autocast": torchs, "polycast.autocast": polycasts, **others},)
    return replace(GOOD, timing=Timing(rounds))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            (0.1, 0.06, 0.05),
            "On cpu these layers are 2.00 times as fast as float32 in bfloat16 with polycast.autocast, which is 1.20 "
            "times as fast as torch.autocast.",
        ),
        (
            (0.1, 0.16, 0.162),
            "On cpu these layers take 1.62 times as long as float32 in bfloat16 with polycast.autocast, which is as "
            "fast as torch.autocast.",
        ),
        (
            (0.1, 0.09, 0.1),
            "On cpu these layers are as fast as float32 in bfloat16 with polycast.autocast, which takes 1.11 times as "
            "long as torch.autocast.",
        ),
    ],
    ids=["faster", "slower", "equal"],
)
def test_the_conclusion_compares_the_times(seconds, said):
    assert conclusion(timed(*seconds)) == said


def test_the_conclusion_includes_int8():
    said = conclusion(timed(0.1, 0.1, 0.1, **{INT8.name: 0.04}))
    assert said.endswith(" as fast as torch.autocast; in int8 they are 2.50 times as fast as float32.")


def test_ratio_is_the_median_over_the_rounds():
    rounds = [{"float32": base, "torch.autocast": base * times} for base, times in [(1, 3), (2, 2), (4, 7)]]
    timing = Timing(tuple(rounds))
    assert timing.ratio(TORCH, FLOAT32) == 3
    assert timing.median(TORCH) == 4


def test_a_good_result_has_no_problem():
    assert problems(GOOD) == []


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_inaccurate_run_is_a_problem(mode):
    assert problems(with_run(mode.name, accuracy=0.9444)) == [
        f"cpu: the accuracy of {mode.name} is 94.44%, expected at least 95%"
    ]


@pytest.mark.parametrize(("epochs", "expected"), [(1, "90%"), (2, "90%"), (3, "95%")])
def test_fewer_epochs_need_not_be_as_accurate(epochs, expected):
    inaccurate = replace(with_run("float32", accuracy=0.8999), epochs=epochs)
    assert problems(inaccurate) == [f"cpu: the accuracy of float32 is 89.99%, expected at least {expected}"]
    assert (problems(replace(with_run("float32", accuracy=0.91), epochs=epochs)) == []) == (epochs < 3)


def test_devices_that_need_a_plugin_are_on_one_line(monkeypatch):
    monkeypatch.setattr(demo, "measure", lambda *_: GOOD)
    missing = [name for name, status in polycast.backends().items() if status.state == "missing"]
    said = [line for line in run_demo().stdout.splitlines() if line.startswith("Not on ")]
    assert said[-1].startswith(f"Not on {', '.join(missing)}: A plugin is needed: ")
    assert len(said) == 1 + sum(status.state == "unavailable" for status in polycast.backends().values())


def test_no_line_is_longer_than_the_terminal(monkeypatch):
    for name, value in {"COLUMNS": "60", "TTY_COMPATIBLE": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demo, "measure", lambda *_: GOOD)
    said = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", run_demo().stdout)
    assert "OK on cpu: " in said
    assert "Report in " in said
    assert [line for line in said.splitlines() if len(line) > 60] == []


def test_headers_of_tables_do_not_wrap(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(demo, "measure", lambda *_: GOOD)
    headers = [line.split("  ") for line in run_demo().stdout.splitlines() if line.startswith(("mode ", "layer "))]
    assert [[cell.strip() for cell in header if cell.strip()] for header in headers] == [
        ["mode", "test accuracy", "final loss"],
        ["layer", "float32", "torch.autocast", "polycast.autocast"],
        ["mode", "ms a call", "times float32"],
    ]


def test_an_accuracy_that_is_just_high_enough_is_no_problem():
    assert problems(with_run("float32", accuracy=342 / 360)) == []


def test_different_losses_are_a_problem():
    assert problems(with_run("polycast.autocast", loss=0.0201)) == [
        "cpu: the final losses of torch.autocast (0.02000000) and polycast.autocast (0.02010000) differ by 5.0e-03 of "
        "the larger, expected at most 1e-04"
    ]


def test_losses_that_differ_by_rounding_are_no_problem():
    assert problems(with_run("polycast.autocast", loss=0.02 * (1 + 1e-7))) == []


def test_an_int8_accuracy_at_the_tolerance_is_no_problem():
    assert problems(replace(GOOD, accuracies={"float32": 0.98, "polycast int8": 0.9751})) == []


@pytest.mark.parametrize("low", [0.9749, 0.986, float("nan")])
def test_an_int8_accuracy_far_from_that_of_float32_is_a_problem(low):
    assert problems(replace(GOOD, accuracies={"float32": 0.98, "polycast int8": low})) == [
        f"cpu: the accuracy of polycast int8 is {low:.2%}, and that of float32 98.00% with the same network: "
        "expected at most 0.5 points apart"
    ]


def test_a_loss_that_is_not_a_number_is_a_problem():
    (problem,) = problems(with_run("polycast.autocast", loss=float("nan")))
    assert "polycast.autocast (nan) differ by nan" in problem


def test_autocast_without_effect_is_a_problem():
    dtypes = {"conv1": "float32", "loss": "float32"}
    assert problems(with_run("polycast.autocast", dtypes=dtypes)) == [
        "cpu: no layer outputs bfloat16 under polycast.autocast: it had no effect",
        "cpu: conv1 outputs bfloat16 under torch.autocast, but float32 under polycast.autocast",
    ]


def test_the_command_prints_its_measurements(monkeypatch):
    monkeypatch.setattr(demo, "measure", lambda device_type, *_: replace(GOOD, device_type=device_type))
    result = run_demo()
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["polycast.autocast", "97.00%", "0.02000000"] in rows
    assert ["conv1", "float32", "bfloat16", "bfloat16"] in rows
    assert ["polycast.autocast", "150.0", "1.50"] in rows
    assert f"{conclusion(GOOD)}\n" in result.stdout
    assert (
        "OK on cpu: every run is at least 95% accurate, and the final losses of the two autocasts are equal to the "
        "last bit.\n"
    ) in result.stdout
    assert result.stderr == ""
    assert result.exit_code == 0


def test_a_slow_dtype_is_reported(monkeypatch, hand_made):
    hand_made("cpu", default_dtype=torch.bfloat16, slow_reason=lambda dtype: "it has no such unit")
    monkeypatch.setattr(demo, "measure", lambda *_: GOOD)
    assert "\nbfloat16 is slow on cpu: it has no such unit.\n" in run_demo().stdout


def test_the_command_prints_a_row_for_int8(monkeypatch):
    rounds = ({**GOOD.timing.rounds[0], INT8.name: 0.05},)
    accuracies = dict.fromkeys(rounds[0], 0.9722)
    low_bit = (LowBit("cpu", "int8", "aten::linear", calls=2), LowBit("cpu", "int8", "aten::mm", "it is small", 1))
    result = replace(GOOD, timing=Timing(rounds), accuracies=accuracies, low_bit=low_bit)
    monkeypatch.setattr(demo, "measure", lambda *_: result)
    said = run_demo().stdout
    assert "linear: 2 in int8.\nmm: 1 in bfloat16: it is small.\n" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["polycast", "int8", "50.0", "0.50", "97.22%"] in rows


@pytest.mark.parametrize("wrong", [{"accuracy": 0.5}, {"loss": 0.03}], ids=["accuracy", "loss"])
def test_the_command_fails_if_the_result_has_a_problem(monkeypatch, wrong):
    monkeypatch.setattr(demo, "measure", lambda *_: with_run("polycast.autocast", **wrong))
    result = run_demo()
    assert result.stderr.splitlines()[0] == f"polycast: {problems(with_run('polycast.autocast', **wrong))[0]}"
    assert "OK on" not in result.stdout
    assert result.exit_code == 1


@pytest.mark.slow
def test_the_command_runs_from_end_to_end(engine, monkeypatch):
    monkeypatch.setattr("polycast.cli.demo.inference_timing.ROUNDS", 2)
    result = run_demo("--epochs", "3")
    parts = ["float32", "torch.autocast", "polycast.autocast", "inference"]
    said = [line for line in result.stderr.splitlines() if not line.startswith(("polycast: bui", "polycast: wait"))]
    assert said == [f"cpu: {part} ..." for part in parts]
    assert f"engine: {engine}.\n" in result.stdout
    assert "OK on cpu: every run is at least 95% accurate" in result.stdout
    assert result.exit_code == 0
    if engine == "reference":  # it cannot be observed
        assert result.stdout.splitlines()[-1].startswith("No report: ")
        return
    said = re.fullmatch(r"Report in (.+/report.html): (.+)\.", result.stdout.splitlines()[-1])
    assert "of the floating-point ops and" in said[2]
    assert "time in bfloat16; " in said[2]
    assert "Sequential" in Path(said[1]).read_text(encoding="utf-8")


def test_a_report_is_written_to_the_given_path_even_if_the_result_has_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "measure", lambda *_: with_run("polycast.autocast", accuracy=0.5))
    result = run_demo("--report", str(tmp_path / "mine.html"))
    assert (
        result.stdout.splitlines()[-1] == f"Report in {tmp_path}/mine.html: no op ran; 0 casts of 0 bytes; no findings."
    )
    assert (tmp_path / "mine.html").is_file()
    assert result.exit_code == 1


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    folder = tmp_path / "missing"
    result = run_demo("--report", str(folder / "report.html"))
    assert result.stderr == (
        f"polycast: {folder}/report.html cannot be written: {folder} does not exist. Create it, or choose another.\n"
    )
    assert result.stdout == ""
    assert result.exit_code == 2


def test_the_command_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = run_demo()
    assert result.stderr.startswith('polycast: the demo needs scikit-learn: pip install "polycast[demo]" (')
    assert result.stdout == ""
    assert result.exit_code == 1


def test_the_command_without_a_device(monkeypatch):
    monkeypatch.setattr(registry, "_discovered", None)
    monkeypatch.setattr(registry, "ready", {})
    monkeypatch.setenv("POLYCAST_BLOCK", "cpu,cuda,xpu")
    result = run_demo()
    assert result.stderr == "polycast: no device is available; see polycast devices\n"
    assert result.exit_code == 1
