"""The runs of the demo: its digits, how it trains in each mode, and what it measures."""

from dataclasses import replace

import pytest
import torch
from polycast.cli.demo.digits import Digits, load_digits, network
from polycast.cli.demo.inference_timing import BATCH, ROUNDS, large_layers
from polycast.cli.demo.result_checks import problems

import polycast
from polycast.cli import demo
from polycast.cli.demo.training import FLOAT32, INT8, MODES, POLYCAST, TORCH, inference_modes, train

pytest.importorskip("sklearn", reason="the demo's digits are scikit-learn's")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Run on one thread: several, which wait for each other at every small op, are slow on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def few():
    """Return some of the digits."""
    digits = load_digits()
    return Digits(digits.images[:300], digits.labels[:300], digits.test_images[:50], digits.test_labels[:50])


@pytest.fixture(scope="module")
def measured(few):
    """Return the result of a short run on the cpu, and the labels of its progress."""
    said = []
    return demo.measure("cpu", torch.bfloat16, few, 2, said.append), said


def needs_int8():
    answer = polycast.plugin.get_backend("cpu").recipe_availability(polycast.Int8())
    if not answer.available:
        pytest.skip(answer.reason)


def kernel_of_mm():
    """Return the line of the dispatch table for mm at the Autocast key of cpu, which says where it was registered."""
    (line,) = (
        line for line in torch._C._dispatch_dump_table("aten::mm").splitlines() if line.startswith("AutocastCPU")
    )
    return line


def test_all_digits_are_loaded():
    digits = load_digits()
    assert digits.images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert sorted(set(digits.labels.tolist())) == list(range(10))
    assert (digits.images.min(), digits.images.max()) == (0, 1)


def test_networks_start_equal_and_do_not_change_the_random_state():
    before = torch.get_rng_state()
    ours, theirs = network("cpu").state_dict(), network("cpu").state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_each_mode_has_a_run(measured):
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
def test_the_loss_shows_an_op_that_runs_in_the_wrong_precision(measured, few, hand_made, op, policy):
    result, _ = measured
    right = polycast.plugin.get_backend("cpu").policies
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


def test_the_timed_layers_have_enough_flops_for_autocast():
    linears = [each for each in large_layers("cpu") if isinstance(each, torch.nn.Linear)]
    assert sum(2 * BATCH * layer.weight.numel() for layer in linears) > 10e9


def test_int8_is_about_as_accurate_as_float32_with_the_same_network(measured):
    result, _ = measured
    needs_int8()
    assert set(result.accuracies) == {mode.name for mode in (*MODES, INT8)}
    assert result.accuracies[FLOAT32.name] == result.runs[FLOAT32.name].accuracy
    assert result.accuracies[INT8.name] == pytest.approx(result.runs[FLOAT32.name].accuracy, abs=0.05)


def test_a_device_without_int8_is_not_timed_with_it(hand_made):
    hand_made("cpu", default_dtype=torch.bfloat16, policies=polycast.plugin.get_backend("cpu").policies)
    assert inference_modes("cpu") == MODES


def test_progress_is_reported_as_often_as_announced(measured, few):
    _, said = measured
    assert len(said) == demo.steps(few, epochs=2)
    assert set(said) == {"cpu: float32", "cpu: torch.autocast", "cpu: polycast.autocast", "cpu: inference"}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_polycast_runs_on_its_own_kernels_and_the_others_on_torchs(mode):
    torchs = kernel_of_mm()
    polycast.install("cpu")
    mode.use_kernels("cpu")
    assert (kernel_of_mm() != torchs) == (mode is POLYCAST)


def test_training_restores_the_choice_of_deterministic_algorithms(few):
    train(FLOAT32, "cpu", torch.bfloat16, few, 1, lambda: None)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_float16_trains_too(few):
    runs = [train(mode, "cpu", torch.float16, few, 1, lambda: None) for mode in (TORCH, POLYCAST)]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-4)
    assert runs[1].dtypes["conv1"] == "float16"
