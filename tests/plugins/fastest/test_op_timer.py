"""`OpTimer`: what is timed, repeated, extrapolated and left out. The clock is the test's."""

from dataclasses import replace

import pytest

import polycast
from polycast_plugins.fastest import op_timer
from polycast_plugins.fastest.cases import Case
from polycast_plugins.fastest.measure import measure
from polycast_plugins.fastest.measurement import PREEMPTED, Omission
from polycast_plugins.fastest.stopwatch import PreemptionWatch, Stopwatch

from .conftest import BFLOAT16, FLOAT32


def test_steady_times_are_found(clock, run, by_rows):
    timer = run(lambda way, work, before: work * (1e-6 if way == "float32" else 5e-7))
    for way, rate in (("float32", 1e-6), ("bfloat16", 5e-7)):
        found = by_rows(timer, way)
        assert list(found) == [1, 4, 16, 128, 1024]
        assert {rows: each.seconds for rows, each in found.items()} == pytest.approx(
            {rows: rate * rows for rows in found}
        )
        assert not any(each.noisy or each.extrapolated for each in found.values())
    assert clock.now < 2.2


def test_a_hopeless_way_is_extrapolated(clock, run, by_rows):
    timer = run(lambda way, work, before: work * (1e-6 if way == "float32" else 1e-2))
    found = by_rows(timer, "bfloat16")
    assert [rows for rows, each in found.items() if each.extrapolated] == [16, 128, 1024]
    assert found[1024].seconds == pytest.approx(10.24)
    assert {work for way, work in clock.calls if way == "bfloat16"} == {1, 4}
    assert not any(each.extrapolated for each in by_rows(timer, "float32").values())
    assert clock.now < 3


@pytest.mark.parametrize(("ratio", "timed"), [(5.9, [1, 4, 16, 128, 1024]), (6.1, [1, 4, 16])])
def test_a_way_that_takes_six_times_as_long_as_float32_is_extrapolated(ratio, timed, run, by_rows):
    timer = run(lambda way, work, before: work * (1e-6 if way == "float32" else ratio * 1e-6))
    found = by_rows(timer, "bfloat16")
    assert [rows for rows, each in found.items() if not each.extrapolated] == timed
    assert found[1024].seconds == pytest.approx(ratio * 1024e-6)


def test_a_hopeless_way_is_extrapolated_from_the_time_of_float32(run, by_rows):
    def seconds(way, work, before):
        return (1e-5 + work * 1e-6) * (7 if way == "bfloat16" else 1)

    timer = run(seconds)
    found = by_rows(timer, "bfloat16")
    assert [rows for rows, each in found.items() if each.extrapolated] == [1024]
    assert found[1024].seconds == pytest.approx(7 * seconds("float32", 1024, 0))


@pytest.mark.parametrize("shortest", [1e-6, 1e-3])
def test_a_way_whose_calls_take_long_besides_the_work_is_no_hopeless_one(shortest, run, by_rows):
    def seconds(way, work, before):
        return shortest * (1 + work / 1e3) * (1 if way == "float32" else 7 if work < 128 else 1)

    found = by_rows(run(seconds, works=(1, 4, 16, 128) if shortest < 1e-4 else (1, 128)), "bfloat16")
    assert found[128].extrapolated == (shortest > 1e-4)


def test_a_case_for_whose_op_the_device_has_no_kernel_is_left_out(clock, run_cases):
    (case,) = clock.cases(lambda way, work, before: 1e-3, works=(1,))
    timer = run_cases([replace(case, op="matmul", needs="aten::mm"), replace(case, op="bmm", needs="aten::miopen_rnn")])
    assert [each.op for each in timer.measurements()] == ["matmul"]
    assert timer.omissions == []


def sized(clock, rows, size, seconds):
    """Return a case of linear, given the seconds by way."""

    def function(way):
        clock.now += seconds(way)

    return Case("linear", rows, size, rows * size, function, lambda way, operands: (way.name,))


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


def test_extrapolation_is_from_the_most_rows_that_were_timed(run, by_rows):
    seconds = {1: 1e-4, 4: 1e-3, 16: 2e-2}
    timer = run(lambda way, work, before: seconds[work], works=(1, 4, 16, 4096))
    found = by_rows(timer, "bfloat16")
    assert found[4096].extrapolated
    assert found[4096].seconds == pytest.approx(2e-2 * 4096 / 16)


def test_a_first_call_that_is_slow_does_not_count(run, by_rows):
    timer = run(lambda way, work, before: 0.5e-3 if before else 2e-3)
    assert by_rows(timer, "bfloat16")[1].seconds == pytest.approx(0.5e-3)


def test_a_stall_at_the_first_call_of_an_op_is_no_rate_for_others(clock, run, by_rows):
    def seconds(way, work, before):  # a library is read from the disk, or memory comes back from swap
        stalls = way == "float32" and sum(clock.calls.values()) == 1
        return 0.4 if stalls else work * 1e-6

    found = by_rows(run(seconds), "float32")
    assert {rows: each.seconds for rows, each in found.items()} == pytest.approx(
        {rows: 1e-6 * rows for rows in (1, 4, 16, 128, 1024)}
    )
    assert not any(each.extrapolated or each.noisy for each in found.values())


def test_what_is_extrapolated_from_a_noisy_time_is_noisy(clock, run, by_rows):
    timer = run(lambda way, work, before: 1e-2 * work * (1 + 5 * clock.now), ways=(FLOAT32,))
    found = by_rows(timer, "float32")
    assert found[1].noisy
    assert all(each.noisy for each in found.values() if each.extrapolated)
    assert any(each.extrapolated for each in found.values())


def test_the_least_of_the_rounds_counts(run, by_rows):
    timer = run(lambda way, work, before: work * (1e-5 if before % 3 else 3e-5))
    assert {rows: each.seconds for rows, each in by_rows(timer, "bfloat16").items()} == pytest.approx(
        {rows: 1e-5 * rows for rows in (1, 4, 16, 128, 1024)}, rel=0.7
    )


def test_a_disturbance_that_ends_is_measured_away(clock, run):
    def seconds(way, work, before):
        return (1e-3 if clock.now < 0.4 else 1e-5) * (2 if way == "bfloat16" else 1)

    timer = run(seconds)
    assert all(not each.noisy for each in timer.measurements())
    assert {each.rows: each.seconds for each in timer.measurements() if each.way == "float32"} == pytest.approx(
        dict.fromkeys((1, 4, 16, 128, 1024), 1e-5)
    )


@pytest.mark.parametrize("begin", [0.0, 0.3, 0.9, 1.2])
def test_a_disturbance_of_all_ways_of_a_case_is_measured_away(begin, clock, run):
    def seconds(way, work, before):
        disturbed = begin <= clock.now < begin + 0.5
        return work * (1e-4 if disturbed and way == "bfloat16" else 3e-5 if disturbed else 1e-5)

    found = run(seconds).measurements()
    assert {(each.way, each.rows): each.seconds for each in found} == pytest.approx(
        {(way, rows): 1e-5 * rows for way in ("float32", "bfloat16") for rows in (1, 4, 16, 128, 1024)}
    )
    assert not any(each.noisy or each.extrapolated for each in found)


@pytest.mark.parametrize("slow", [1, 16, 1024])
def test_a_call_that_is_slow_through_the_first_pass_is_timed_again(slow, clock, run, by_rows):
    def seconds(way, work, before):
        return 0.1 if work == slow and clock.now < 0.9 else work * 1e-6

    found = by_rows(run(seconds), "float32")
    assert found[slow].seconds == pytest.approx(slow * 1e-6)
    assert not any(each.extrapolated for each in found.values())


def test_calls_that_are_slower_than_their_rate_take_no_more_than_their_time(clock, run, by_rows):
    def seconds(way, work, before):
        return 0.5 if work == 1024 else work * 1e-6

    found = by_rows(run(seconds), "bfloat16")
    assert found[1024].seconds == pytest.approx(0.5)
    assert clock.now < 3


def test_what_stays_noisy_is_marked(clock, run, by_rows):
    timer = run(lambda way, work, before: 1e-3 * (1 + 5 * clock.now) if way == "bfloat16" else 1e-3, works=(1,))
    assert by_rows(timer, "bfloat16")[1].noisy
    assert not by_rows(timer, "float32")[1].noisy
    assert clock.now < 3


def test_a_call_that_takes_longer_than_one_with_more_work_is_noisy(run, by_rows):
    timer = run(lambda way, work, before: 1e-3 if work == 4 else work * 1e-6)
    assert [rows for rows, each in by_rows(timer, "float32").items() if each.noisy] == [4]


def test_what_was_preempted_each_time_is_neither_used_nor_extrapolated_from(clock, monkeypatch, run, by_rows):
    monkeypatch.setattr(PreemptionWatch, "was_preempted", lambda self: clock.is_preempted)

    def seconds(way, work, before):
        clock.is_preempted = way == "float32" or work > 1
        return 0.05 if clock.is_preempted else 1e-5

    timer = run(seconds)
    assert by_rows(timer, "float32") == {}
    found = by_rows(timer, "bfloat16")
    assert found[1].seconds == pytest.approx(1e-5)
    assert not found[1].noisy
    assert found[1024].seconds == pytest.approx(1024e-5)
    assert all(each.extrapolated for rows, each in found.items() if rows > 1)
    assert set(timer.omissions) == {Omission("linear", "float32", PREEMPTED)}
    assert clock.now < 3


def test_a_case_whose_first_call_was_preempted_is_timed_again(clock, monkeypatch, run, by_rows):
    monkeypatch.setattr(PreemptionWatch, "was_preempted", lambda self: clock.is_preempted)

    def seconds(way, work, before):
        clock.is_preempted = before < 2
        return 0.04 if clock.is_preempted else 1e-5

    found = by_rows(run(seconds, works=(1,)), "float32")[1]
    assert (found.seconds, found.noisy) == (pytest.approx(1e-5), False)


def test_a_preempted_block_does_not_count(clock, monkeypatch):
    monkeypatch.setattr(PreemptionWatch, "was_preempted", lambda self: clock.is_preempted)

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

    def __init__(self, clock, made, read):
        self._clock = clock
        self._read = read
        clock.now += made

    def is_small(self, size):
        return size < 2**15

    def whole(self):
        return self

    def sum(self):
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


@pytest.mark.parametrize(("seconds", "bandwidth"), [(1e-4, 2**21 / 1e-4), (1e-3, 2**27 / 0.01)])
def test_the_bandwidth_is_the_best_of_a_sum_and_of_a_product_of_one_row(seconds, bandwidth, clock, monkeypatch, run):
    monkeypatch.setattr(op_timer, "Operands", lambda device_type: Memory(clock, 0.0, 0.01))
    times = {"float32": 1e-3, "bfloat16": seconds}
    timer = run(lambda way, work, before: times[way], works=(1,), size=2**20)
    assert timer.bandwidth() == pytest.approx(bandwidth)


def test_the_bandwidth_of_a_device_without_sums_is_unknown(clock, monkeypatch, run):
    def fail(self):
        raise NotImplementedError("no such op")

    monkeypatch.setattr(Memory, "sum", fail)
    monkeypatch.setattr(op_timer, "Operands", lambda device_type: Memory(clock, 0.0, 0.01))
    assert run(lambda way, work, before: 1e-3).bandwidth() == 0.0


def test_the_load_of_others_is_that_of_the_middle_pass(run, monkeypatch):
    loads = iter((0.9, 0.1, 0.2, 0.8, 0.0))
    monkeypatch.setattr(op_timer, "load_of_others", lambda: next(loads))
    assert run(lambda way, work, before: 1e-4).other_load() == 0.2
