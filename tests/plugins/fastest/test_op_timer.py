"""`OpTimer`: what is timed, repeated, extrapolated and left out. The clock is the test's."""

from dataclasses import replace

import pytest
import torch

import polycast
from polycast_plugins.fastest import op_timer
from polycast_plugins.fastest.cases import cases
from polycast_plugins.fastest.measure import measure
from polycast_plugins.fastest.measurement import PREEMPTED, Omission
from polycast_plugins.fastest.operands import MeasuredWay
from polycast_plugins.fastest.stopwatch import Stopwatch

from .conftest import BFLOAT16, FLOAT32, ROWS, by_rows

RATES = {"float32": 1e-5, "bfloat16": 5e-6}
DISTURBED = {
    "nothing": lambda now, way, work, before: 0,
    "the first call": lambda now, way, work, before: 2e-3 * (not before),
    # A library is read from the disk, or memory comes back from swap.
    "the first call of an op": lambda now, way, work, before: 0.4 * (way == "float32" and now == 0),
    "a part of the first pass": lambda now, way, work, before: 1e-3 * (now < 0.4),
    **{
        f"all ways of a case, from {begin} s on": lambda now, way, work, before, begin=begin: (
            work * (1e-4 if way == "bfloat16" else 2e-5) * (begin <= now < begin + 0.5)
        )
        for begin in (0.0, 0.3, 0.9, 1.2)
    },
    **{
        f"a case of {slow} rows through the first pass": lambda now, way, work, before, slow=slow: (
            0.1 * (work == slow and now < 0.9)
        )
        for slow in (1, 16, 1024)
    },
}
"""The seconds that a disturbance adds to those of a call."""


@pytest.mark.parametrize("added", DISTURBED.values(), ids=DISTURBED)
def test_a_disturbance_that_ends_is_measured_away(added, clock, run):
    found = run(lambda way, work, before: work * RATES[way] + added(clock.now, way, work, before)).measurements()
    assert {(each.way, each.rows): each.seconds for each in found} == pytest.approx(
        {(way, rows): rate * rows for way, rate in RATES.items() for rows in ROWS}
    )
    assert not any(each.noisy or each.extrapolated for each in found)
    assert clock.now < 2.2


def slower(ratio, shortest=0.0):
    """Return the seconds of calls that take some times as long in bfloat16."""
    return lambda way, work: (shortest + work * 1e-6) * (ratio if way == "bfloat16" else 1)


def slow_for_few(shortest):
    """Return the seconds of calls that take long besides the work, in bfloat16 7 times as long for less work."""
    return lambda way, work: shortest * (1 + work / 1e3) * (7 if way == "bfloat16" and work < 128 else 1)


EXTRAPOLATED = {
    "hopeless": (slower(1e4), ROWS, [16, 128, 1024], 10.24),
    "5.9 times as long": (slower(5.9), ROWS, [], 5.9 * 1024e-6),
    "6.1 times as long": (slower(6.1), ROWS, [128, 1024], 6.1 * 1024e-6),
    "from the time of float32": (slower(7, 1e-5), ROWS, [1024], 7 * (1e-5 + 1024e-6)),
    "short calls": (slow_for_few(1e-6), (1, 4, 16, 128), [], 1.128e-6),
    "long calls": (slow_for_few(1e-3), (1, 128), [128], 128 * 7 * 1.001e-3),
}


@pytest.mark.parametrize("case", EXTRAPOLATED)
def test_a_way_that_takes_six_times_as_long_as_float32_is_extrapolated(case, clock, run):
    seconds, works, extrapolated, longest = EXTRAPOLATED[case]
    timer = run(lambda way, work, before: seconds(way, work), works=works)
    found = by_rows(timer, "bfloat16")
    assert [rows for rows, each in found.items() if each.extrapolated] == extrapolated
    assert found[works[-1]].seconds == pytest.approx(longest)
    assert {work for way, work in clock.calls if way == "bfloat16"} == {*works} - {*extrapolated}
    if case != "long calls":  # which are too long by the rate of the first
        assert not any(each.extrapolated for each in by_rows(timer, "float32").values())
    assert clock.now < 3


def test_a_case_for_whose_op_the_device_has_no_kernel_is_left_out(clock, run_cases):
    (case,) = clock.cases(lambda way, work, before: 1e-3, works=(1,))
    timer = run_cases([replace(case, op="matmul", needs="aten::mm"), replace(case, op="bmm", needs="aten::miopen_rnn")])
    assert [each.op for each in timer.measurements()] == ["matmul"]
    assert timer.omissions == []


def sized(clock, rows, size, seconds):
    return clock.case(rows, size, rows * size, lambda way, work, before: seconds(way))


def test_extrapolation_is_from_less_work_if_that_was_timed(clock, run_cases):
    timer = run_cases([sized(clock, 1, 64, lambda way: 1e-6), sized(clock, 2**14, 64, lambda way: 2e-3)])
    for rows, size, rate in ((1, 2**20, 1e-6 / 64), (2**15, 128, 2e-3 / 2**20), (2**15, 32, 2e-3 / 2**20)):
        assert timer._rate_like(sized(clock, rows, size, None), "float32") == (pytest.approx(rate), False)


@pytest.mark.parametrize(
    ("slow", "ratio", "extrapolated"),
    [
        ({(16, 64)}, 10, {(64, 64)}),
        ({(16, 64)}, 5, set()),  # one neighbour is known, and it may be an exception
        ({(16, 64), (16, 1024)}, 10, {(64, 64), (64, 1024)}),
        ({(16, 64), (64, 64), (16, 1024)}, 5, {(64, 1024)}),
        ({(1, 64)}, 10, set()),  # its calls take as long for less work
    ],
    ids=str,
)
def test_a_way_is_timed_if_it_is_fast_for_fewer_rows_or_for_a_smaller_size(slow, ratio, extrapolated, clock, run_cases):
    def case(rows, size):
        times = {"float32": 1, "bfloat16": ratio if (rows, size) in slow else 1}
        return sized(clock, rows, size, lambda way: rows * size * 1e-7 * times[way])

    found = [case(rows, size) for size in (64, 1024) for rows in (1, 16, 64)]
    timer = run_cases(sorted(found, key=lambda each: each.work), (FLOAT32, BFLOAT16))
    assert {(each.rows, each.size) for each in timer.measurements() if each.extrapolated} == extrapolated


def test_extrapolation_is_from_the_most_rows_that_were_timed(run):
    seconds = {1: 1e-4, 4: 1e-3, 16: 2e-2}
    found = by_rows(run(lambda way, work, before: seconds[work], works=(1, 4, 16, 4096)), "bfloat16")
    assert found[4096].extrapolated
    assert found[4096].seconds == pytest.approx(2e-2 * 4096 / 16)


def test_what_is_extrapolated_from_a_noisy_time_is_noisy(clock, run):
    found = by_rows(run(lambda way, work, before: 1e-2 * work * (1 + 5 * clock.now), ways=(FLOAT32,)), "float32")
    assert found[1].noisy
    assert {each.noisy for each in found.values() if each.extrapolated} == {True}


def test_the_least_of_the_rounds_counts(run):
    timer = run(lambda way, work, before: work * (1e-5 if before % 3 else 3e-5))
    assert {rows: each.seconds for rows, each in by_rows(timer, "bfloat16").items()} == pytest.approx(
        {rows: 1e-5 * rows for rows in ROWS}, rel=0.7
    )


def test_calls_that_are_slower_than_their_rate_take_no_more_than_their_time(clock, run):
    found = by_rows(run(lambda way, work, before: 0.5 if work == 1024 else work * 1e-6), "bfloat16")
    assert found[1024].seconds == pytest.approx(0.5)
    assert clock.now < 3


def test_what_stays_noisy_is_marked(clock, run):
    timer = run(lambda way, work, before: 1e-3 * (1 + 5 * clock.now) if way == "bfloat16" else 1e-3, works=(1,))
    assert {each.way: each.noisy for each in timer.measurements()} == {"float32": False, "bfloat16": True}
    assert clock.now < 3


def test_a_call_that_takes_longer_than_one_with_more_work_is_noisy(run):
    timer = run(lambda way, work, before: 1e-3 if work == 4 else work * 1e-6)
    assert [rows for rows, each in by_rows(timer, "float32").items() if each.noisy] == [4]


def test_what_was_preempted_each_time_is_neither_used_nor_extrapolated_from(clock, run):
    def seconds(way, work, before):
        clock.is_preempted = way == "float32" or work > 1
        return 0.05 if clock.is_preempted else 1e-5

    timer = run(seconds)
    assert by_rows(timer, "float32") == {}
    found = by_rows(timer, "bfloat16")
    assert {rows: each.seconds for rows, each in found.items()} == pytest.approx({rows: rows * 1e-5 for rows in ROWS})
    assert not found[1].noisy
    assert [rows for rows, each in found.items() if each.extrapolated] == [4, 16, 128, 1024]
    assert set(timer.omissions) == {Omission("linear", "float32", PREEMPTED)}
    assert clock.now < 3


@pytest.mark.parametrize(
    ("is_preempted", "slow", "ends", "noisy"),
    [(lambda before: before < 2, 0.04, op_timer._ENDS, False), (lambda before: before > 5, 1e-3, (1.1,), True)],
    ids=["the first", "all but the first"],
)
def test_calls_that_were_preempted_do_not_count(is_preempted, slow, ends, noisy, clock, run, monkeypatch):
    monkeypatch.setattr(op_timer, "_ENDS", ends)

    def seconds(way, work, before):
        clock.is_preempted = is_preempted(before)
        return slow if clock.is_preempted else 1e-5

    timer = run(seconds, works=(1,))
    assert [(each.seconds, each.noisy) for each in timer.measurements()] == [(pytest.approx(1e-5), noisy)] * 2
    assert timer.omissions == []


def test_a_preempted_block_does_not_count(clock):
    def call():
        clock.calls["call"] += 1
        clock.is_preempted = clock.calls["call"] % 2 == 0
        clock.now += 2e-3 if clock.is_preempted else 1e-3

    watch = Stopwatch("cpu", clock)
    assert watch.estimate(call, 1.0) == pytest.approx((1e-3, False))
    assert watch.time_interleaved({"one": call}, {"one": 1e-3}, 0.01)["one"] == pytest.approx([1e-3] * 4)
    clock.calls["call"] = 1
    assert watch.estimate(call, 0.0) == pytest.approx((2e-3, True))


def test_turn_is_cut_off_where_calls_become_slow(clock):
    def call():
        clock.calls["call"] += 1
        clock.now += 1e-5 if clock.calls["call"] < 3 else 0.02

    assert Stopwatch("cpu", clock).time(call, 10000) == pytest.approx((2e-5 + 0.02) / 3)


class Memory:
    """Stands in for the operands: no memory, which is made and read in a given time."""

    nbytes = 2**27

    def __init__(self, clock, made=0.0, read=0.01):
        self._clock = clock
        self._read = read
        clock.now += made

    def is_small(self, size):
        return size < 2**15

    def whole(self):
        return self

    def sum(self):
        if self._read is None:
            raise NotImplementedError("no such op")
        self._clock.now += self._read


@pytest.mark.parametrize(("made", "read"), [(1.3, 0.0), (0.0, 0.7), (0.0, 0.02), (0.4, 0.3)])
def test_making_the_memory_and_reading_it_is_part_of_the_time(made, read, clock, monkeypatch, hand_made):
    monkeypatch.setattr(op_timer, "Operands", lambda device_type: Memory(clock, made, read))
    monkeypatch.setattr(op_timer, "Stopwatch", lambda device_type: Stopwatch(device_type, clock))
    noisy = clock.cases(lambda way, work, before: work * 1e-5 * (1 + clock.now))
    monkeypatch.setattr(op_timer, "cases", lambda: noisy)
    backend = hand_made("cpu")
    polycast.plugin.get_backend("cpu")
    found = measure(backend)
    assert found.ways("linear") == ("float32", "float16", "bfloat16")
    assert found.bandwidth == pytest.approx(2**27 / max(read, 1e-9))
    assert 1.5 < clock.now < 3


@pytest.mark.parametrize(
    ("read", "size", "seconds", "bandwidth"),
    [(0.01, 2**20, 1e-4, 2**21 / 1e-4), (0.01, 2**20, 1e-3, 2**27 / 0.01), (None, 64, 1e-3, 0.0)],
    ids=["a product of one row", "a sum", "unknown"],
)
def test_the_bandwidth_is_the_best_of_a_sum_and_of_a_product(read, size, seconds, bandwidth, clock, monkeypatch, run):
    monkeypatch.setattr(op_timer, "Operands", lambda device_type: Memory(clock, read=read))
    times = {"float32": 1e-3, "bfloat16": seconds}
    timer = run(lambda way, work, before: times[way], works=(1,), size=size)
    assert timer.bandwidth() == pytest.approx(bandwidth)


def test_the_load_of_others_is_that_of_the_middle_pass(run, monkeypatch):
    loads = iter((0.9, 0.1, 0.2, 0.8, 0.0))
    monkeypatch.setattr(op_timer, "load_of_others", lambda: next(loads))
    assert run(lambda way, work, before: 1e-4).other_load() == 0.2


RAISES = {
    "in a case": (
        lambda work, before: work > 4,
        NotImplementedError("no kernel for. It has\nfew rows only"),
        "NotImplementedError: no kernel for",
        [1, 4],
        {16: 1, 128: 1, 1024: 1},
    ),
    **{
        f"after {count} calls": (
            lambda work, before, count=count: work == 16 and before >= count,
            MemoryError("the device is out of memory"),
            "MemoryError: the device is out of memory",
            [1, 4, 128, 1024],
            {16: count + 1},
        )
        for count in (3, 7, 100)
    },
}


@pytest.mark.parametrize("case", RAISES)
def test_what_raises_is_left_out_with_the_reason_and_not_called_again(case, clock, run):
    raises, error, text, timed, calls = RAISES[case]

    def seconds(way, work, before):
        if way == "bfloat16" and raises(work, before):
            raise error
        return work * 1e-6

    timer = run(seconds)
    assert {way: [*by_rows(timer, way)] for way in RATES} == {"float32": [*ROWS], "bfloat16": timed}
    assert not any(each.noisy for each in timer.measurements())
    assert timer.omissions == [Omission("linear", "bfloat16", text)]
    assert {work: clock.calls["bfloat16", work] for work in calls} == calls


def test_a_way_that_takes_long_to_fail_is_not_tried_for_other_cases(clock, run):
    def seconds(way, work, before):
        if way == "bfloat16":
            clock.now += 0.4
            raise NotImplementedError("no kernel")
        return work * 1e-6

    timer = run(seconds)
    assert timer.omissions == [Omission("linear", "bfloat16", "NotImplementedError: no kernel")]
    assert [clock.calls["bfloat16", work] for work in ROWS] == [1, 0, 0, 0, 0]


def test_an_interruption_is_passed_on(run):
    def seconds(way, work, before):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(seconds)


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
