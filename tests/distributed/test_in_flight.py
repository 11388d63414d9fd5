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
def test_the_memory_of_a_collective_is_given_back_after_it(then):
    enter_a_region()  # from here on collectives are watched
    reduced = torch.ones(4, 4)
    distributed.all_reduce(reduced)
    end, left = time.monotonic() + 60, weakref.ref(reduced)
    del reduced
    while left() is not None and time.monotonic() < end:  # gloo's own thread may hold it yet
        then()
    assert left() is None
