"""The memory of collectives that have ended, in a process group of one."""

import time
import weakref

import pytest
import torch
from torch import distributed

import polycast

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="torch has no gloo here"
)


@pytest.fixture(autouse=True)
def _group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def enter_a_region():
    with polycast.autocast("cpu"):
        pass


def reduce_another():
    distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize("then", [enter_a_region, reduce_another])
@pytest.mark.usefixtures("engine")
def test_the_memory_of_a_collective_is_freed_after_it(then):
    enter_a_region()  # from here on collectives are tracked
    reduced = torch.ones(4, 4)
    distributed.all_reduce(reduced)
    end, left = time.monotonic() + 60, weakref.ref(reduced)
    del reduced
    while left() is not None and time.monotonic() < end:  # gloo's own thread may still hold it
        then()
    assert left() is None


@pytest.mark.usefixtures("engine")
def test_a_weight_with_a_pending_collective_is_not_prepacked(int8_kernels):
    layer, x = torch.nn.Linear(8, 8), torch.ones(3, 8)
    enter_a_region()
    work = distributed.all_reduce(layer.weight.data, async_op=True)
    with torch.no_grad(), polycast.autocast("cpu", recipe=polycast.Int8(min_size=1)):
        layer(x)
    assert int8_kernels["aten::linear"].prepared == 0
    work.wait()


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # observe needs the native engine
@pytest.mark.usefixtures("engine", "int8_kernels")
def test_the_reason_why_it_is_not_prepacked():
    layer, x = torch.nn.Linear(8, 8), torch.ones(3, 8)
    enter_a_region()
    work = distributed.all_reduce(layer.weight.data, async_op=True)
    (record,) = low_bit_of(layer, x)
    assert record.declined.startswith("something else holds the weight's memory")
    work.wait()


@pytest.mark.parametrize(
    "engine", ["native"], indirect=True
)  # the reference engine does not detect the end of a collective
@pytest.mark.usefixtures("engine", "int8_kernels")
def test_the_recipe_computes_the_first_call_after_a_collective():
    layer, x = torch.nn.Linear(8, 8), torch.ones(3, 8)
    low_bit_of(layer, x)
    outcomes = []
    for _ in range(20):  # gloo's own thread may still hold the memory for a moment
        distributed.all_reduce(layer.weight.data)
        outcomes += [record.declined for record in low_bit_of(layer, x)]
    assert "" in outcomes


def low_bit_of(layer, x):
    recipe = polycast.Int8(min_size=1)
    with torch.no_grad(), polycast.observe() as seen, polycast.autocast("cpu", recipe=recipe):
        layer(x)
    return seen.low_bit
