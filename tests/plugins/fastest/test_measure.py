"""Measuring for real: the cases, the ways that a backend offers, and that measuring leaves no trace."""

import pytest
import torch
from tests.conftest import Int8Linear
from torch._subclasses import FakeTensorMode

import polycast
from polycast.registry.registry import registry
from polycast_plugins.fastest import measure as measuring
from polycast_plugins.fastest import op_timer, operands, stopwatch
from polycast_plugins.fastest.cases import ATTENTION, ATTENTION_BACKWARD, CONVOLUTIONS, OPS, cases
from polycast_plugins.fastest.measure import measure, ways_of
from polycast_plugins.fastest.measurement import Omission
from polycast_plugins.fastest.operands import MeasuredWay, Operands
from polycast_plugins.fastest.workloads import workload_of

from .conftest import FLOAT32


class Doubling(polycast.plugin.LowBitKernel):
    """A kernel of the fast dtype, which counts its calls."""

    uses_cast = True
    takes_float32 = True
    calls = 0

    def unsupported_reason(self, *args):
        return "it is for few rows" if args[0].shape[0] > 4 else None

    def run(self, prepacked, *args):
        type(self).calls += 1
        (weight,) = prepacked
        assert weight.dtype is args[0].dtype in (torch.float32, torch.get_autocast_dtype("cpu"))
        return torch.nn.functional.linear(args[0], weight)


@pytest.fixture
def with_kernels(hand_made):
    """Serve cpu by a backend with kernels for int8 and for the fast dtype."""

    def low_bit_kernels(recipe):
        return {"aten::linear": Doubling() if recipe.kind == "fastest" else Int8Linear()}

    def recipe_availability(recipe):
        offered = recipe.kind in ("int8", "fastest")
        return polycast.plugin.Availability(offered, "" if offered else "it has no units for it")

    return hand_made("cpu", recipe_availability=recipe_availability, low_bit_kernels=low_bit_kernels)


@pytest.fixture
def quick(monkeypatch):
    """Time only small cases, for a short time, and take the machine to be idle."""
    monkeypatch.setattr(stopwatch, "_involuntary_switches", lambda: 0)
    monkeypatch.setattr(op_timer, "cases", lambda: [case for case in cases() if case.work < 2**20])
    monkeypatch.setattr(operands, "_BYTES", 2**22)
    monkeypatch.setattr(op_timer, "_ENDS", (0.1,))


def test_ways_are_float32_the_fast_dtypes_recipes_and_kernels(with_kernels):
    found, omitted = ways_of(with_kernels)
    names = ["float32", "float16", "bfloat16", "int8", "float16 kernel", "bfloat16 kernel", "float32 kernel"]
    assert sorted(way.name for way in found) == sorted(names)
    assert Omission("all ops", "float8", "it has no units for it") in omitted


def test_kernels_of_the_backend_are_measured(with_kernels, quick):
    polycast.plugin.get_backend("cpu")
    found = measure(with_kernels)
    kernels = {"float16 kernel", "bfloat16 kernel", "float32 kernel"}
    assert set(found.ways("linear")) == {"float32", "float16", "bfloat16", "int8", *kernels}
    rows = {each.rows for each in found.measurements if (each.op, each.way) == ("linear", "bfloat16 kernel")}
    assert rows == {1, 4}
    assert Omission("linear", "bfloat16 kernel", "it is for few rows") in found.omissions
    assert Omission("matmul", "int8", "the backend has no kernel for it") in found.omissions
    assert Doubling.calls > 0


@pytest.mark.parametrize("can_wait", [True, False])
def test_any_accelerator_is_measured_through_torchs_ops(can_wait, hand_made, quick, monkeypatch):
    waits = []

    def synchronize():
        waits.append(1)
        if not can_wait:
            raise RuntimeError("it has no streams")

    backend = hand_made("cpu")
    assert polycast.plugin.get_backend("cpu") is backend
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    found = measure(backend)
    for op in ("linear", "bmm"):
        assert found.ways(op) == ("float32", "float16", "bfloat16")
    assert len(waits) > 100 if can_wait else len(waits) == 1


def test_backend_whose_tensors_cannot_be_made_is_an_error(hand_made, monkeypatch):
    def fail(self, device_type):
        raise NotImplementedError("no such op")

    monkeypatch.setattr(Operands, "__init__", fail)
    with pytest.raises(RuntimeError, match="cpu cannot be measured: NotImplementedError: no such op"):
        measure(polycast.plugin.get_backend("cpu"))


def test_the_cases_are_those_of_the_documentation():
    found = [each for each in cases() if not each.is_large]
    assert {each.op for each in found} == set(OPS)
    for op in ("linear", "matmul"):
        assert {(each.rows, each.size) for each in found if each.op == op} == {
            (rows, size) for rows in (1, 4, 8, 16, 128, 1024) for size in (64 * 64, 256 * 256, 1024 * 1024)
        }
    assert [each.work for each in found] == sorted(each.work for each in found)


@pytest.mark.parametrize("accelerator", [None, torch.device("cpu")], ids=str)
@pytest.mark.usefixtures("queues")
def test_large_cases_are_for_devices_that_queue_calls(accelerator, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    timed = op_timer.OpTimer("cpu", (FLOAT32,))._cases
    assert max(each.size for each in timed if each.op == "linear") == (2**20 if accelerator is None else 2**24)
    assert max(each.rows for each in timed if each.op == "cast") == (2**20 if accelerator is None else 2**24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_large_case_fits_in_the_memory(dtype):
    operands = Operands("cpu")
    for case in cases():
        if case.is_large:
            name = "to bfloat16" if case.op == "cast" else "a way"
            case.prepare(MeasuredWay(name, dtype, torch.bfloat16), operands)


@pytest.mark.usefixtures("queues")
def test_first_calls_on_a_device_that_queues_them_are_not_timed(run):
    timer = run(lambda way, work, before: 1e-5 if before else 1.0, (FLOAT32,))
    assert [(each.seconds, each.extrapolated) for each in timer.measurements()] == [(pytest.approx(1e-5), False)] * 5


@pytest.mark.usefixtures("queues")
def test_passes_take_longer_on_a_device_that_queues_calls(run):
    timer = run(lambda way, work, before: 0.01, (FLOAT32,), works=range(1, 61))
    assert not any(each.noisy or each.extrapolated for each in timer.measurements())


def surroundings():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
    )


SURROUNDINGS = {
    "a region": lambda: polycast.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "fake tensors": FakeTensorMode,
    "another default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("where", SURROUNDINGS)
def test_what_surrounds_it_is_neither_measured_nor_changed(where, quick, engine):
    with SURROUNDINGS[where]():
        before = surroundings() if where != "fake tensors" else None
        found = measure(registry.find("cpu"))
        assert before is None or surroundings() == before
    assert {"float32", "bfloat16", "float16"} <= set(found.ways("linear"))
    assert not [each for each in found.omissions if each.way in ("float32", "bfloat16")]


def test_an_interruption_restores_the_state(monkeypatch):
    def interrupt(self):
        torch.set_autocast_dtype("cpu", torch.float16)
        raise KeyboardInterrupt

    monkeypatch.setattr(op_timer.OpTimer, "run", interrupt)
    with polycast.autocast("cpu"):
        before = surroundings()
        with pytest.raises(KeyboardInterrupt):
            measuring.measure(registry.find("cpu"))
        assert surroundings() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_operands_are_normal_numbers(dtype):
    operands = Operands("cpu")
    for values in (*operands.activations((64, 64), dtype=dtype), operands.weights(256, 256, dtype=dtype)[-1]):
        assert values.dtype is dtype
        assert bool(values.isfinite().all())
        assert bool((values.abs() >= torch.finfo(dtype).tiny).all())
        assert float(values.abs().max()) <= 2.0
        assert 0.2 < float((values < 0).float().mean()) < 0.8


def test_convolutions_are_measured_as_what_calls_of_them_are_priced_by():
    operands = Operands("cpu")
    found = [case for case in cases() if case.op in CONVOLUTIONS]
    assert {case.op for case in found} == {*CONVOLUTIONS}
    for case in found:
        x, *others = case.arguments(FLOAT32, operands)
        workload = workload_of("aten::conv2d", (x, torch.empty(case.weight.shape), *others))
        assert workload[:3] == (case.op, case.rows, case.size)


def test_weights_are_used_in_turn():
    operands = Operands("cpu")
    weights = operands.weights(1024, 1024, dtype=torch.float32)
    assert len(weights) == 32
    assert len({weight.data_ptr() for weight in weights}) == 32
    next_weight = operands.in_turn(weights, weights[0].nbytes)
    assert len({next_weight().data_ptr() for _ in range(32)}) == 32
    assert len(operands.weights(64, 64, dtype=torch.float32)) == 1


@pytest.mark.slow
def test_all_is_measured_on_a_cpu(kept, monkeypatch):
    monkeypatch.setattr(stopwatch, "_involuntary_switches", lambda: 0)  # on a busy machine every block may be preempted
    found = polycast.profile("cpu", refresh=True)
    for op in ("linear", "matmul"):
        for rows in (1, 4, 8, 16, 128, 1024):
            assert found.ratio(op, rows, "bfloat16") > 0
            sizes = {each.size for each in found.measurements if (each.op, each.rows) == (op, rows)}
            assert sizes == {2**12, 2**16, 2**20}
    for op in (*CONVOLUTIONS, "bmm", ATTENTION, ATTENTION_BACKWARD, "lstm", "encoder_layer"):
        assert found.ratio(op, 128, "bfloat16") > 0
    assert found.seconds("cast", 1000, "to bfloat16") > 0
    assert found.seconds("cast", 1000, "from float16") > 0
    assert found.bandwidth > 1e8
    assert polycast.DeviceProfile.from_json(found.to_json()) == found
