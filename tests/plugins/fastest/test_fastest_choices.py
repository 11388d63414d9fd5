"""Choices of the recipe "fastest": equal for equal profiles and shape buckets, in any order and in any process."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import polycast
from polycast import Fastest, autocast
from polycast_plugins.fastest import choose_way, recorded_ways
from polycast_plugins.fastest.cases import ATTENTION_BACKWARD
from polycast_plugins.fastest.choose_way import Conversions, Way, bucket, choose, seconds_of
from polycast_plugins.fastest.measurement import Measurement, Omission
from polycast_plugins.fastest.recorded_ways import RecordedOperands, choose_recorded
from polycast_plugins.fastest.workloads import Workload

KERNELS = (Way.KERNEL, Way.FLOAT32_KERNEL)
WAYS = {"bfloat16": 0.7, "bfloat16 kernel": 0.5, "float32 kernel": 0.45, "float32": 1.0}
SEQUENCES = [(8, 2**12), (64, 2**15), (128, 2**16)]
LARGE, SHAPES = 2**14, [(1, 64, 64), (100, 64, 64), (130, 64, 64), (8, 1024, 64), (1000, 96, 96), (4, 300, 300)]


def profile_with(measurements, bandwidth=0.0, omissions=()):
    return polycast.DeviceProfile("cpu", "a processor", 2, {}, {}, tuple(measurements), bandwidth, omissions)


def without(profile, op, way):
    """Return the profile of a device on which an op raises in a way."""
    left = [each for each in profile.measurements if (each.op, each.way) != (op, way)]
    return replace(profile, measurements=tuple(left), omissions=(Omission(op, way, "RuntimeError: no kernel"),))


@pytest.fixture
def profile():
    """Return a profile in which each way is the fastest for some sizes, and conversions matter."""
    pick = random.Random(0)
    measurements = [
        Measurement(op, rows, way, (2e-6 + ratio * 1e-11 * rows * size) * pick.uniform(0.4, 2.5), size)
        for op in ("linear", "matmul", "bmm", "conv2d", "scaled_dot_product_attention")
        for way, ratio in WAYS.items()
        for size in (2**12, 2**16, 2**20)
        for rows in (1, 4, 8, 16, 128, 1024)
    ]
    measurements += [
        Measurement("cast", elements, f"{direction} bfloat16", 1e-6 + elements * 2e-10)
        for direction in ("to", "from")
        for elements in (1, 2**12, 2**20)
    ]
    return profile_with(measurements, 2e10)


@pytest.fixture
def crossing():
    """Return a profile in which float32 becomes faster than bfloat16 within the bucket of 128 rows."""
    seconds = {"bfloat16": {64: 0.5e-3, 256: 8e-3}, "float32": {64: 1e-3, 256: 4e-3}}
    return profile_with(
        Measurement(op, rows, way, each, LARGE)
        for op in ("linear", "matmul")
        for way, by_rows in seconds.items()
        for rows, each in by_rows.items()
    )


def fresh(profile):
    """Return the profile as another process reads it, with no choice made yet."""
    for choices in (choose_way._choose, recorded_ways._choose):
        choices.cache_clear()
    return polycast.DeviceProfile.from_json(profile.to_json())


def random_calls(count):
    """Return the arguments of random choices, besides the profile and the dtype."""
    pick = random.Random(1)

    def size(most=20):
        return int(2 ** pick.uniform(0, most))

    def workload():
        op = pick.choice(["linear", "matmul", "bmm", "conv2d", "small_conv2d", "scaled_dot_product_attention"])
        return Workload(op, size(11), size(22), size(20), size(11))

    inference = [
        (choose, workload(), Conversions(*(pick.choice([0, size()]) for _ in range(3))), pick.choice([(), KERNELS]))
        for _ in range(count)
    ]
    flags = [[pick.random() < 0.5 for _ in range(6)] for _ in range(count)]
    recorded = [(choose_recorded, workload(), RecordedOperands(size(), size(), *each)) for each in flags]
    return [*inference, *recorded]


def made(profile, calls):
    return [function(profile, torch.bfloat16, *args) for function, *args in calls]


def test_choices_depend_on_the_profile_alone(profile):
    calls = random_calls(300)
    expected = made(fresh(profile), calls)
    assert {each.way for each in expected[:300]} == {*Way}
    assert len({each[:3] for each in expected[300:]}) > 3
    assert made(profile, calls) == expected  # from memory
    assert made(fresh(profile), calls) == expected
    assert made(fresh(profile), calls[::-1])[::-1] == expected


def test_each_tensor_that_is_converted_takes_the_time_of_a_call(profile_of):
    x = torch.ones(2, 4, 4)
    with autocast("cpu", recipe=Fastest(profile_of(overhead=1e-5, cast=1e-15, bfloat16=1.0))):
        for other, way in ((x, "float32"), (x.bfloat16(), "bfloat16")):
            assert f"computes it in {way}" in str(polycast.explain("aten::bmm", x, other, device_type="cpu"))


def test_what_runs_out_of_memory_in_float32_is_not_computed_in_it():
    """On a GPU, where small calls take the time of a call; the fast dtype alone was timed with large sizes."""
    op = "scaled_dot_product_attention"
    small = [(rows, size) for size in (2**15, 786432) for rows in (1, 16, 128)]
    measurements = [Measurement(op, rows, way, 2e-5, size) for way in ("float32", "bfloat16") for rows, size in small]
    measurements += [Measurement(op, rows, "bfloat16", 1e-7 * rows + 4e-5, 2**23) for rows in (1, 2048)]
    omissions = (Omission(op, "float32", "OutOfMemoryError: CUDA out of memory"),)
    profile = profile_with(measurements, omissions=omissions)
    workload = Workload(op, 2048, 2**23, 2**22)
    assert choose(profile, torch.bfloat16, workload, Conversions(3 * 2**22, 0, 0), ()).way is Way.FAST
    assert not choose_way.is_unsupported(profile, op, "float32")
    assert choose_way.is_unsupported(replace(profile, measurements=()), op, "float32")


@pytest.mark.parametrize("grad", [False, True])
def test_calls_of_the_same_bucket_are_computed_alike(crossing, engine, grad):
    weight = nn.Parameter(torch.randn(128, 128), requires_grad=grad)
    ways = {}
    with autocast("cpu", recipe=Fastest(crossing)):
        for rows in (32, 64, 91, 100, 128, 150, 181, 182, 256, 512):
            told = polycast.explain("linear", torch.ones(rows, 128), weight, device_type="cpu")
            ways.setdefault(bucket(rows), set()).add(told.way)
    few, many = dict.fromkeys((32, 64, 128), "bfloat16"), dict.fromkeys((256, 512), "float32")
    assert ways == {size: {way} for size, way in (few | many).items()}


def test_values_do_not_decide(profile, engine):
    recipe, weight = Fastest(profile), nn.Parameter(torch.randn(64, 64), requires_grad=False)
    with autocast("cpu", recipe=recipe):
        told = [
            polycast.explain("linear", torch.full((9, 64), value), weight, device_type="cpu").reason
            for value in (0.0, 1e30, float("nan"))
        ]
    assert len(set(told)) == 1


def explained(path):
    """Return the ways of some calls by the profile in a file, and why."""
    found = []
    for grad in (False, True):
        for rows, inner, columns in SHAPES:
            weight = nn.Parameter(torch.ones(columns, inner))
            with torch.set_grad_enabled(grad), autocast("cpu", recipe=Fastest(str(path))):
                told = polycast.explain("linear", torch.ones(rows, inner), weight, device_type="cpu")
            found.append([told.way, told.reason])
    return found


@pytest.mark.slow
def test_another_process_chooses_alike(profile, tmp_path, launch):
    path = tmp_path / "machine.json"
    profile.save(path)
    expected = explained(path)
    assert len({way for way, _ in expected}) > 1
    program = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
    program += f"from {__name__} import explained; print(json.dumps(explained(sys.argv[1])))"
    done = launch(program, path, environment={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


OPERANDS = RecordedOperands(2**15, 2**16, False, False, False, False, first_needed=True, second_needed=True)
ATTENTION = Workload("scaled_dot_product_attention", 128, 2**16, 2**15)


def chosen(profile, operands=OPERANDS):
    return choose_recorded(profile, torch.bfloat16, ATTENTION, operands)


def test_an_attention_is_computed_in_float32_where_its_backward_is_slow_in_the_fast_dtype(profile_of):
    assert chosen(profile_of(bfloat16=1.1)).are_all_fast
    found = chosen(profile_of(bfloat16={ATTENTION_BACKWARD: 9, "other": 1.1}))
    assert (found.first, found.second) == (Way.FLOAT32, Way.FLOAT32)
    assert "backward in float32" in found.reason


def test_an_attention_that_the_backward_computes_again_is_priced_by_it(profile_of):
    profile = profile_of(bfloat16={ATTENTION_BACKWARD: 2, "other": 1.0})
    assert chosen(profile).first is Way.FLOAT32
    assert chosen(profile, OPERANDS._replace(is_recomputed=True)).are_all_fast


@pytest.mark.parametrize(("ratio", "is_fast"), [(1.1, True), (4, False)])
def test_an_attention_whose_backward_was_measured_in_one_way_only_is_priced_by_its_forward(profile_of, ratio, is_fast):
    profile = profile_of(float32=1, bfloat16=ratio)
    for way in ("float32", "bfloat16"):
        assert chosen(replace(without(profile, ATTENTION_BACKWARD, way), omissions=())).are_all_fast is is_fast
    assert chosen(without(profile, ATTENTION_BACKWARD, "bfloat16")).first is Way.FLOAT32


def test_the_backward_of_an_attention_is_priced_by_its_work():
    timed = [Measurement(ATTENTION_BACKWARD, rows, "float32", 1e-10 * rows * size, size) for rows, size in SEQUENCES]
    profile = profile_with(timed)
    for rows, size in ((16, 2**19), (64, 2**19), (512, 2**16)):
        assert seconds_of(profile, ATTENTION_BACKWARD, "float32", rows, size) == pytest.approx(1e-10 * rows * size)


def test_a_product_without_a_kernel_in_the_fast_dtype_is_trained_in_float32(profile):
    found = choose_recorded(
        without(profile, "linear", "bfloat16"),
        torch.bfloat16,
        Workload("linear", 128, LARGE, 128 * 128, 128),
        RecordedOperands(128 * 128, LARGE, True, False, True, False, True, True),
    )
    assert found[:4] == (Way.FLOAT32, Way.FLOAT32, Way.FLOAT32, choose_way.NO_FAST_KERNEL)
    assert found.is_float32
