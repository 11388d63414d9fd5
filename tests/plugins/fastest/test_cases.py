"""The cases that are timed: their sizes, and those that only devices that queue calls are timed on."""

import pytest
import torch

from polycast_plugins.fastest import op_timer
from polycast_plugins.fastest.cases import OPS, cases
from polycast_plugins.fastest.operands import MeasuredWay, Operands
from polycast_plugins.fastest.stopwatch import Stopwatch

FLOAT32 = MeasuredWay("float32", torch.float32, torch.bfloat16)


def test_the_cases_are_those_of_the_documentation():
    found = [each for each in cases() if not each.is_large]
    assert {each.op for each in found} == set(OPS)
    for op in ("linear", "matmul"):
        assert {(each.rows, each.size) for each in found if each.op == op} == {
            (rows, size) for rows in (1, 4, 8, 16, 128, 1024) for size in (64 * 64, 256 * 256, 1024 * 1024)
        }
    assert [each.work for each in found] == sorted(each.work for each in found)


@pytest.mark.parametrize("queues", [False, True])
def test_large_cases_are_for_devices_that_queue_calls(queues, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu") if queues else None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    timed = op_timer.OpTimer("cpu", (FLOAT32,))._cases
    assert max(each.size for each in timed if each.op == "linear") == (2**24 if queues else 2**20)
    assert max(each.rows for each in timed if each.op == "cast") == (2**24 if queues else 2**20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_large_case_fits_in_the_memory(dtype):
    operands = Operands("cpu")
    for case in cases():
        if case.is_large:
            name = "to bfloat16" if case.op == "cast" else "a way"
            case.prepare(MeasuredWay(name, dtype, torch.bfloat16), operands)


def test_passes_take_longer_on_a_device_that_queues_calls(clock, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    works = range(1, 61)
    monkeypatch.setattr(op_timer, "cases", lambda: clock.cases(lambda way, work, before: 0.01, works=works))
    timer = op_timer.OpTimer("cpu", (FLOAT32,))
    timer._stopwatch = Stopwatch("cpu", clock)
    timer.run()
    assert not any(each.noisy or each.extrapolated for each in timer.measurements())
