"""The demo finds what is wrong, and its exit status says so."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import polycast

DEMO = Path(__file__).parent.parent.parent / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("sklearn", reason="the demo's digits are scikit-learn's")
    return runpy.run_path(str(DEMO))


def test_each_thing_that_is_wrong_is_named(demo):
    float32, cast = {"conv1": "torch.float32"}, {"conv1": "torch.bfloat16"}
    plain, fast = demo["Run"](nn.Identity(), 0.98, 0.02, float32), demo["Run"](nn.Identity(), 0.97, 0.02, cast)

    def problems(float32=plain, torchs=fast, polycasts=fast, int8=None):
        runs = dict(zip(demo["TRAINED"], (float32, torchs, polycasts), strict=True))
        return list(demo["problems"](torch.bfloat16, runs, int8))

    def by_loss(loss):
        return [f"the loss is 0.02000000 under torch.autocast, and {loss} under polycast.autocast"]

    def by_int8(accuracy):
        return [f"the network trained in float32 has an accuracy of 98.00%, and in int8 {accuracy}"]

    assert problems() == problems(int8=0.9751) == problems(polycasts=fast._replace(loss=0.02 * (1 + 1e-7))) == []
    assert problems(plain._replace(accuracy=342 / 360)) == []
    assert problems(plain._replace(accuracy=0.9444)) == ["the accuracy of float32 is 94.44%, expected at least 95%"]
    assert problems(torchs=fast._replace(accuracy=math.nan)) == [
        "the accuracy of torch.autocast is nan%, expected at least 95%"
    ]
    assert problems(polycasts=fast._replace(loss=0.0201)) == by_loss("0.02010000")
    assert problems(polycasts=fast._replace(loss=math.nan)) == by_loss("nan")
    assert problems(int8=0.9749) == by_int8("97.49%")
    assert problems(int8=0.986) == by_int8("98.60%")
    assert problems(int8=math.nan) == by_int8("nan%")
    assert problems(polycasts=fast._replace(dtypes=float32)) == [
        "no layer outputs torch.bfloat16 under polycast.autocast",
        "conv1 outputs torch.bfloat16 under torch.autocast, and torch.float32 under polycast.autocast",
    ]


def run(demo, monkeypatch, **constants):
    """Run the demo with other constants; return its exit status."""
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *args, **options: None)
    for name, value in constants.items():
        monkeypatch.setitem(demo["main"].__globals__, name, value)
    with pytest.raises(SystemExit) as ended:
        demo["main"]()
    return ended.value.code


def test_what_there_is_to_gain_is_said_first(demo, monkeypatch, capsys):
    by_mode = {"float32": 1.0, "torch.autocast": 0.8, "polycast.autocast": 0.9, "polycast, WeightCache": 1.5}
    monkeypatch.setitem(demo["compare_speeds"].__globals__, "speeds", lambda *_: {**by_mode, "polycast, int8": 4.96})
    monkeypatch.setattr(polycast.plugin, "check", lambda *_: True)
    assert demo["compare_speeds"]("cpu", torch.bfloat16)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "Times as fast as float32    1 row 512 rows",
        "torch.autocast                0.8      0.8",
        "polycast.autocast             0.9      0.9",
        "polycast, WeightCache         1.5      1.5",
        "polycast, int8                5.0      5.0",
        "",
        "With one row, as a language model decodes a token, polycast, int8 is 5.0 times as fast as float32, "
        "torch.autocast 0.8 times.",
    ]


def test_polycast_uses_an_updated_weight_and_torch_does_not(demo):
    uses = {mode: demo["uses_new_weight"](mode, "cpu", torch.bfloat16) for mode in demo["TRAINED"]}
    assert uses == {"float32": True, "torch.autocast": False, "polycast.autocast": True}


@pytest.mark.slow
@pytest.mark.parametrize("op", ["conv2d", "linear", "group_norm", "cross_entropy_loss"])
def test_an_op_that_runs_in_another_precision_is_found(demo, hand_made, monkeypatch, op):
    right = polycast.plugin.get_backend("cpu").policies
    wrong = polycast.CastPolicy.PASSTHROUGH if op == "cross_entropy_loss" else polycast.CastPolicy.FP32
    hand_made("cpu", default_dtype=torch.bfloat16, policies={**right, f"aten::{op}": wrong})
    few = demo["Digits"](*(part[:192] for part in demo["load_digits"]("cpu")))
    small = {"load_digits": lambda device: few, "LEAST_ACCURACY": 0, "EPOCHS": 2, "ROUNDS": 1, "FEATURES": 64}
    seen = "norm1 outputs torch.bfloat16 under torch.autocast" if op == "group_norm" else "the loss is "
    assert f"On cpu, {seen}" in run(demo, monkeypatch, **small)


def test_without_a_device_the_demo_fails(demo, monkeypatch):
    monkeypatch.setattr(polycast, "backends", dict)
    assert run(demo, monkeypatch) == "No device is available: polycast devices says why."
