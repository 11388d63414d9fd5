"""The memory of casts while threads run a frozen model in regions, and after them."""

import json

import pytest

pytestmark = pytest.mark.slow

# Processes of their own: what may be alive depends on the largest cast that the process has made.
PROGRAM = """
import json, sys, threading
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
import polycast

THREADS, SHAPES = json.loads(sys.argv[1])
torch.set_num_threads(1)
made, lock = [], threading.Lock()


def look_at(cast):
    storage = cast.untyped_storage()
    with lock:
        made.append((StorageWeakRef(storage), storage.nbytes()))
    return cast.sum()


def alive():
    "The bytes of the casts that are alive. Several may have lain in the same memory, one after the other."
    return sum({reference.cdata: size for reference, size in made if not reference.expired()}.values())


library = torch.library.Library("polycast_test", "FRAGMENT")
library.define("look_at(Tensor cast) -> Tensor")
library.impl("look_at", look_at, "CompositeExplicitAutograd")
polycast.register_op("polycast_test::look_at", polycast.CastPolicy.LOWER_PRECISION_FP)
model = [nn.Parameter(torch.ones(shape), requires_grad=False) for shape in SHAPES]
inside, left, after, end = (threading.Barrier(THREADS + 1) for _ in range(4))


def work():
    for _ in range(2):  # the second region knows which weights the first has used
        with torch.no_grad(), polycast.autocast("cpu"):
            for weight in model:
                torch.ops.polycast_test.look_at(weight)
            inside.wait()
            left.wait()
        after.wait()
        end.wait()


threads = [threading.Thread(target=work) for _ in range(THREADS)]
for thread in threads:
    thread.start()
figures = []
for _ in range(2):
    inside.wait()
    while_inside = alive()
    left.wait()
    after.wait()
    figures.append((while_inside, alive()))
    end.wait()
for thread in threads:
    thread.join()
print(json.dumps(figures))
"""

MIB = 2**20
LARGE, BIAS = (8, 2**18), (64,)
LARGEST, SMALL_ONES = 4 * MIB, MIB


MIXED, TWO = [BIAS, LARGE, BIAS, (4, 2**18)] * 3 + [LARGE], 2 * LARGEST + SMALL_ONES


@pytest.mark.parametrize(("threads", "layers", "most"), [(1, [LARGE] * 6, LARGEST), (2, MIXED, TWO), (6, MIXED, TWO)])
def test_one_or_two_large_casts_are_alive_of_a_frozen_model_and_none_after_the_regions(
    run_program, threads, layers, most
):
    status, figures, errors = run_program(PROGRAM, "native", json.dumps([threads, layers]))
    assert status == 0, errors
    for in_regions, after in json.loads(figures):
        assert LARGEST <= in_regions <= most
        assert after == 0
