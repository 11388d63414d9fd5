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
@pytest.mark.usefixtures("native")
def test_the_memory_of_a_collective_is_freed_after_it(then):
    enter_a_region()  # from here on collectives are tracked
    reduced = torch.ones(4, 4)
    distributed.all_reduce(reduced)
    end, left = time.monotonic() + 60, weakref.ref(reduced)
    del reduced
    while left() is not None and time.monotonic() < end:  # gloo's own thread may still hold it
        then()
    assert left() is None


@pytest.mark.usefixtures("native", "no_grad")
def test_a_weight_with_a_pending_collective_is_not_prepacked(int8_kernels, declined):
    layer = torch.nn.Linear(8, 8)
    enter_a_region()
    work = distributed.all_reduce(layer.weight.data, async_op=True)
    assert declined(layer).startswith("something else holds the weight's memory")
    assert int8_kernels["aten::linear"].prepared == 0
    work.wait()


@pytest.mark.usefixtures("native", "int8_kernels", "no_grad")
def test_the_recipe_computes_the_first_call_after_a_collective(declined):
    layer = torch.nn.Linear(8, 8)
    declined(layer)
    outcomes = []
    for _ in range(20):  # gloo's own thread may still hold the memory for a moment
        distributed.all_reduce(layer.weight.data)
        outcomes.append(declined(layer))
    assert "" in outcomes
