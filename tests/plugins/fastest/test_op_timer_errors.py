"""`OpTimer` where kernels raise or are not there. The clock is the test's."""

import pytest
import torch

import polycast
from polycast_plugins.fastest import op_timer
from polycast_plugins.fastest.cases import cases
from polycast_plugins.fastest.measurement import Omission
from polycast_plugins.fastest.operands import MeasuredWay
from polycast_plugins.fastest.stopwatch import PreemptionWatch


def test_what_raises_is_left_out_with_the_reason(clock, run, by_rows):
    def seconds(way, work, before):
        if way == "bfloat16" and work > 4:
            raise NotImplementedError("no kernel for. It has\nfew rows only")
        return 1e-4

    timer = run(seconds)
    assert list(by_rows(timer, "bfloat16")) == [1, 4]
    assert list(by_rows(timer, "float32")) == [1, 4, 16, 128, 1024]
    assert timer.omissions == [Omission("linear", "bfloat16", "NotImplementedError: no kernel for")]
    assert [clock.calls["bfloat16", work] for work in (16, 128, 1024)] == [1, 1, 1]


def test_what_is_unsupported_is_not_extrapolated(run_cases, clock):
    class FewRows(polycast.plugin.LowBitKernel):
        def unsupported_reason(self, *args):
            return "too many rows" if args[0].shape[0] > 4 else None

        def prepack(self, weight):
            return (weight.clone(),)

        def run(self, prepacked, *args):
            clock.now += 10.0  # so that there is no time for other cases

    way = MeasuredWay("int8", torch.bfloat16, torch.bfloat16, {"aten::linear": FewRows()})
    timer = run_cases([case for case in cases() if case.op == "linear"], [way])
    assert {each.rows for each in timer.measurements()} == {1, 4}
    assert timer.omissions == [Omission("linear", "int8", "too many rows")]


def test_an_interruption_is_passed_on(run):
    def seconds(way, work, before):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(seconds)


@pytest.mark.parametrize("before", [3, 7, 100])
def test_what_raises_later_is_left_out_and_not_called_again(before, clock, run, by_rows):
    def seconds(way, work, calls):
        if (way, work) == ("bfloat16", 16) and calls >= before:
            raise MemoryError("the device is out of memory")
        return work * 1e-6

    timer = run(seconds)
    assert list(by_rows(timer, "bfloat16")) == [1, 4, 128, 1024]
    assert not any(each.noisy for each in timer.measurements())
    assert timer.omissions == [Omission("linear", "bfloat16", "MemoryError: the device is out of memory")]
    assert clock.calls["bfloat16", 16] == before + 1


def test_a_way_that_takes_long_to_fail_is_not_tried_for_other_cases(clock, run):
    def seconds(way, work, before):
        if way == "bfloat16":
            clock.now += 0.4
            raise NotImplementedError("no kernel")
        return work * 1e-6

    timer = run(seconds)
    assert timer.omissions == [Omission("linear", "bfloat16", "NotImplementedError: no kernel")]
    assert [clock.calls["bfloat16", work] for work in (1, 4, 16, 128, 1024)] == [1, 0, 0, 0, 0]


def test_the_first_call_counts_where_all_others_were_preempted(clock, run, by_rows, monkeypatch):
    monkeypatch.setattr(op_timer, "_ENDS", (1.1,))
    monkeypatch.setattr(PreemptionWatch, "was_preempted", lambda self: clock.is_preempted)

    def seconds(way, work, before):
        clock.is_preempted = before > 5
        return 1e-3 if before > 5 else 1e-5

    timer = run(seconds, works=(1,))
    assert [each.seconds for each in timer.measurements()] == pytest.approx([1e-5, 1e-5])
    assert timer.omissions == []
