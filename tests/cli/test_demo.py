"""The demo: what it measures, what it demands of its result, and how it says that it failed."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import polycast
from polycast.cli import app, demo
from polycast.cli.demo.checks import Result, problems
from polycast.cli.demo.digits import Digits, load_digits, network
from polycast.cli.demo.report import conclusion
from polycast.cli.demo.timing import BATCH, ROUNDS, Timing, large_layers
from polycast.cli.demo.training import FLOAT32, INT8, MODES, POLYCAST, TORCH, Run, inference_modes, train
from polycast.engine.native.loading import ENGINE
from polycast.observer.facts import Facts
from polycast.observer.records import LowBit
from polycast.plugins.registry import registry
from polycast.toolchain.load import try_build

pytest.importorskip("sklearn", reason="the demo's digits are scikit-learn's")

AUTOCAST_DTYPES = {"conv1": "bfloat16", "loss": "float32"}
GOOD = Result(
    "cpu",
    torch.bfloat16,
    {
        "float32": Run("float32", 0.98, 0.021, {"conv1": "float32", "loss": "float32"}),
        "torch.autocast": Run("torch.autocast", 0.97, 0.02, AUTOCAST_DTYPES),
        "polycast.autocast": Run("polycast.autocast", 0.97, 0.02, AUTOCAST_DTYPES),
    },
    Timing(({"float32": 0.1, "torch.autocast": 0.2, "polycast.autocast": 0.15},)),
    polycast.Observation(Facts()),
)


def with_run(mode, **changes):
    """Return the good result with the run of one mode changed."""
    return replace(GOOD, runs={**GOOD.runs, mode: replace(GOOD.runs[mode], **changes)})


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Several threads that wait for each other at every small op are slow where the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def few():
    """Some of the digits."""
    digits = load_digits()
    return Digits(digits.images[:300], digits.labels[:300], digits.test_images[:50], digits.test_labels[:50])


@pytest.fixture(scope="module")
def measured(few):
    """Return the result of a short run on the cpu, and what it said of its steps."""
    said = []
    return demo.measure("cpu", torch.bfloat16, few, 2, said.append), said


def needs_int8():
    answer = polycast.get_backend("cpu").recipe_availability(polycast.Int8())
    if not answer.available:
        pytest.skip(answer.reason)


def kernel_of_mm():
    """Return where the kernel that serves mm at the Autocast key of cpu was registered."""
    (line,) = (
        line for line in torch._C._dispatch_dump_table("aten::mm").splitlines() if line.startswith("AutocastCPU")
    )
    return line


@pytest.fixture(autouse=True)
def _temporary_files(tmp_path, monkeypatch):
    """Have the command write its report, where it is not told where to, in a folder of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run_demo(*arguments):
    return CliRunner().invoke(app, ["demo", *arguments])


def test_digits_are_all_there():
    digits = load_digits()
    assert digits.images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert sorted(set(digits.labels.tolist())) == list(range(10))
    assert (digits.images.min(), digits.images.max()) == (0, 1)


def test_networks_start_equal_and_leave_the_random_state_alone():
    before = torch.get_rng_state()
    ours, theirs = network("cpu").state_dict(), network("cpu").state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_a_run_for_each_mode(measured):
    result, _ = measured
    assert list(result.runs) == ["float32", "torch.autocast", "polycast.autocast"]


def test_training_learns(measured):
    result, _ = measured
    assert all(run.accuracy > 0.5 for run in result.runs.values())
    assert all(0 < run.loss < 1.5 for run in result.runs.values())


def test_both_autocasts_reach_the_same_loss(measured):
    result, _ = measured
    assert result.loss_difference() <= 1e-4


@pytest.mark.parametrize(
    ("op", "policy"),
    [
        ("aten::conv2d", polycast.CastPolicy.FP32),
        ("aten::linear", polycast.CastPolicy.FP32),
        ("aten::group_norm", polycast.CastPolicy.FP32),
        ("aten::cross_entropy_loss", polycast.CastPolicy.PASSTHROUGH),
    ],
)
def test_loss_tells_an_op_that_runs_in_the_wrong_precision(measured, few, hand_made, op, policy):
    result, _ = measured
    right = polycast.get_backend("cpu").policies
    hand_made("cpu", default_dtype=torch.bfloat16, policies={**right, op: policy})
    wrong = train(POLYCAST, "cpu", torch.bfloat16, few, 2, lambda: None)
    found = problems(replace(result, runs={**result.runs, POLYCAST.name: wrong}))
    assert any("the final losses of torch.autocast" in problem for problem in found)


def test_autocast_changes_the_loss(measured):
    result, _ = measured
    assert result.runs[FLOAT32.name].loss != result.runs[POLYCAST.name].loss


@pytest.mark.parametrize("mode", [TORCH, POLYCAST], ids=lambda mode: mode.name)
def test_dtypes_of_the_layers_under_autocast(measured, mode):
    result, _ = measured
    dtypes = result.runs[mode.name].dtypes
    assert (dtypes["conv1"], dtypes["logits"], dtypes["loss"]) == ("bfloat16", "bfloat16", "float32")


def test_dtypes_of_the_layers_without_autocast(measured):
    result, _ = measured
    assert set(result.runs[FLOAT32.name].dtypes.values()) == {"float32"}


def test_inference_is_timed_in_every_mode(measured):
    result, _ = measured
    assert len(result.timing.rounds) == ROUNDS
    assert all(result.timing.median(mode) > 0 for mode in inference_modes("cpu"))


def test_what_is_timed_has_enough_to_do_for_autocast():
    products = [each for each in large_layers("cpu") if isinstance(each, torch.nn.Linear)]
    assert sum(2 * BATCH * layer.weight.numel() for layer in products) > 10e9


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
def test_a_sentence_says_what_the_times_show(seconds, said):
    assert conclusion(timed(*seconds)) == said


def test_a_sentence_says_what_int8_shows():
    said = conclusion(timed(0.1, 0.1, 0.1, **{INT8.name: 0.04}))
    assert said.endswith(" as fast as torch.autocast; in int8 they are 2.50 times as fast as float32.")


def test_int8_gets_about_as_many_images_right_as_float32_with_the_same_network(measured):
    result, _ = measured
    needs_int8()
    assert set(result.accuracies) == {mode.name for mode in (*MODES, INT8)}
    assert result.accuracies[FLOAT32.name] == result.runs[FLOAT32.name].accuracy
    assert result.accuracies[INT8.name] == pytest.approx(result.runs[FLOAT32.name].accuracy, abs=0.05)


def test_a_device_without_int8_is_not_timed_in_it(hand_made):
    hand_made("cpu", default_dtype=torch.bfloat16, policies=polycast.get_backend("cpu").policies)
    assert inference_modes("cpu") == MODES


def test_ratio_is_the_median_over_the_rounds():
    rounds = [{"float32": base, "torch.autocast": base * times} for base, times in [(1, 3), (2, 2), (4, 7)]]
    timing = Timing(tuple(rounds))
    assert timing.ratio(TORCH, FLOAT32) == 3
    assert timing.median(TORCH) == 4


def test_progress_is_told_as_often_as_announced(measured, few):
    _, said = measured
    assert len(said) == demo.steps(few, epochs=2)
    assert set(said) == {"cpu: float32", "cpu: torch.autocast", "cpu: polycast.autocast", "cpu: inference"}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_polycast_runs_on_its_own_kernels_and_the_others_on_torchs(mode):
    torchs = kernel_of_mm()
    polycast.install("cpu")
    mode.use_kernels("cpu")
    assert (kernel_of_mm() != torchs) == (mode is POLYCAST)


def test_training_leaves_the_choice_of_algorithms_as_it_was(few):
    train(FLOAT32, "cpu", torch.bfloat16, few, 1, lambda: None)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_float16_trains_too(few):
    runs = [train(mode, "cpu", torch.float16, few, 1, lambda: None) for mode in (TORCH, POLYCAST)]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-4)
    assert runs[1].dtypes["conv1"] == "float16"


def test_good_result_has_no_problem():
    assert problems(GOOD) == []


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_inaccurate_run_is_a_problem(mode):
    assert problems(with_run(mode.name, accuracy=0.9444)) == [
        f"cpu: the accuracy of {mode.name} is 94.44%, expected at least 95%"
    ]


def test_accuracy_that_is_just_enough_is_no_problem():
    assert problems(with_run("float32", accuracy=342 / 360)) == []


def test_losses_apart_are_a_problem():
    assert problems(with_run("polycast.autocast", loss=0.0201)) == [
        "cpu: the final losses of torch.autocast (0.02000000) and polycast.autocast (0.02010000) differ by 5.0e-03 of "
        "the larger, expected at most 1e-04"
    ]


def test_losses_that_differ_in_rounding_are_no_problem():
    assert problems(with_run("polycast.autocast", loss=0.02 * (1 + 1e-7))) == []


def test_int8_that_is_just_near_enough_is_no_problem():
    assert problems(replace(GOOD, accuracies={"float32": 0.98, "polycast int8": 0.9751})) == []


@pytest.mark.parametrize("low", [0.9749, 0.986, float("nan")])
def test_int8_that_is_far_from_float32_is_a_problem(low):
    assert problems(replace(GOOD, accuracies={"float32": 0.98, "polycast int8": low})) == [
        f"cpu: the accuracy of polycast int8 is {low:.2%}, and that of float32 98.00% with the same network: "
        "expected at most 0.5 points apart"
    ]


def test_loss_that_is_not_a_number_is_a_problem():
    (problem,) = problems(with_run("polycast.autocast", loss=float("nan")))
    assert "polycast.autocast (nan) differ by nan" in problem


def test_autocast_that_was_not_in_force_is_a_problem():
    dtypes = {"conv1": "float32", "loss": "float32"}
    assert problems(with_run("polycast.autocast", dtypes=dtypes)) == [
        "cpu: no layer outputs bfloat16 under polycast.autocast: it had no effect",
        "cpu: conv1 outputs bfloat16 under torch.autocast, but float32 under polycast.autocast",
    ]


def test_command_prints_what_it_measured(monkeypatch):
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


def test_command_prints_a_row_for_int8_where_there_is_one(monkeypatch):
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
def test_command_fails_where_the_result_is_wrong(monkeypatch, wrong):
    monkeypatch.setattr(demo, "measure", lambda *_: with_run("polycast.autocast", **wrong))
    result = run_demo()
    assert result.stderr.splitlines()[0] == f"polycast: {problems(with_run('polycast.autocast', **wrong))[0]}"
    assert "OK on" not in result.stdout
    assert result.exit_code == 1


@pytest.mark.slow
def test_command_runs_from_end_to_end(engine, monkeypatch):
    try_build(ENGINE)  # what is built at first use says so
    monkeypatch.setattr("polycast.cli.demo.timing.ROUNDS", 2)
    result = run_demo("--epochs", "3")
    assert result.stderr == ""
    assert f"engine: {engine}.\n" in result.stdout
    assert "OK on cpu: every run is at least 95% accurate" in result.stdout
    assert result.exit_code == 0
    if engine == "reference":  # which cannot be observed
        assert result.stdout.splitlines()[-1].startswith("No report: ")
        return
    said = re.fullmatch(r"Report in (.+/report.html): (.+)\.", result.stdout.splitlines()[-1])
    assert "of the floating-point ops and" in said[2]
    assert "time in bfloat16; " in said[2]
    assert "Sequential" in Path(said[1]).read_text(encoding="utf-8")


def test_a_report_goes_where_it_is_asked_for_also_of_a_wrong_result(monkeypatch, tmp_path):
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
        f"polycast: {folder}/report.html cannot be written: {folder} is not there. Make it, or name another.\n"
    )
    assert result.stdout == ""
    assert result.exit_code == 2


def test_command_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = run_demo()
    assert result.stderr.startswith('polycast: the demo needs scikit-learn: pip install "polycast[demo]" (')
    assert result.stdout == ""
    assert result.exit_code == 1


def test_command_without_a_device(monkeypatch):
    monkeypatch.setattr(registry, "_discovered", None)
    monkeypatch.setattr(registry, "ready", {})
    monkeypatch.setenv("POLYCAST_BLOCK", "cpu,cuda,xpu")
    result = run_demo()
    assert result.stderr == "polycast: no device is available; see polycast devices\n"
    assert result.exit_code == 1
