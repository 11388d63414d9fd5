"""Regions, threads and processes that end at unexpected times."""

from pathlib import Path

import pytest
import torch

import polycast

pytestmark = pytest.mark.slow

HEAD = """
import gc, os, sys, threading, torch, polycast
torch.set_num_threads(1)
X = torch.ones(4, 4, dtype=torch.bfloat16)

def weight():
    return torch.nn.Parameter(torch.ones(4, 4))
"""


COLLECTED = """
def suspended(cycle):
    with polycast.autocast("cpu", cache=polycast.WeightCache()):
        torch.mm(X, weight())
        yield cycle

def collect(phase, info):
    if phase == "start":
        collections.append(polycast.autocast_nesting("cpu"))

collections = []
gc.collect()
gc.freeze()  # torch's many objects, so that collections are fast
gc.callbacks.append(collect)
with torch.no_grad():
    for turn in range(200):
        cycle = []
        cycle.append(suspended(cycle))
        next(cycle[0])
        new, shared = weight(), torch.nn.Parameter(torch.ones(8, 4)[:4])
        gc.disable()
        garbage = [[] for _ in range(1000)]
        del cycle, garbage
        gc.set_threshold(1)
        gc.enable()
        out = torch.mm(X, new)
        gc.set_threshold(700)
        gc.collect()
        assert out[0, 0] == 4 and out.dtype in (torch.bfloat16, torch.float32), out
        assert polycast.autocast_nesting("cpu") == 0
print(max(collections))
"""


COLLECTED_AT_ENDS = """
def suspended(cycle):
    with polycast.autocast("cpu"):
        yield cycle

def collected(function):
    cycle = []
    cycle.append(suspended(cycle))
    next(cycle[0])
    gc.disable()
    del cycle
    gc.set_threshold(1)
    gc.enable()
    function()
    gc.set_threshold(700)
    gc.collect()

gc.collect()
gc.freeze()  # torch's many objects, so that collections are fast
region = polycast.autocast("cpu")
collected(region.__enter__)
print(polycast.autocast_nesting("cpu"))
collected(lambda: region.__exit__(None, None, None))
print(polycast.autocast_nesting("cpu"), torch.is_autocast_enabled("cpu"))
"""


COLLECTED_AT_A_HIT = """
kept, x, limits = torch.nn.Parameter(torch.ones(64, 64), requires_grad=False), torch.ones(1, 64), gc.get_threshold()

def suspended(cycle):
    with polycast.autocast("cpu"):
        torch.mm(x, kept)
        yield cycle

gc.collect()
gc.freeze()  # so that each of the collections below is short
for allocations in range(300):
    gc.disable()
    gc.collect()
    cycle = []
    cycle.append(suspended(cycle))
    next(cycle[0])
    del cycle
    gc.set_threshold(gc.get_count()[0] + allocations, *limits[1:])
    gc.enable()
    torch.mm(x, kept)
    gc.set_threshold(*limits)
    gc.collect()
    assert polycast.autocast_nesting("cpu") == 0
print("done")
"""


THREADS = """
from torch.autograd.graph import saved_tensors_hooks

@torch.library.custom_op("ends::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

class Enters:
    def __del__(self):
        self.region = polycast.autocast("cpu")
        self.region.__enter__()
        torch.mm(X, weight())

def work(local):
    local.value = Enters()
    polycast.autocast("cpu").__enter__()
    with saved_tensors_hooks(lambda tensor: [tensor], lambda held: held[0]):
        kept.append(weight())
        out = torch.mm(X.clone().requires_grad_(), kept[-1])
        double(out)

kept = []
for _ in range(4):
    thread = threading.Thread(target=work, args=(threading.local(),))
    thread.start()
    thread.join()
with polycast.autocast("cpu"):
    torch.mm(X, weight())
polycast.uninstall()
print("at the end")
"""


PROGRAMS = {
    "a region is collected while an op adds a cast to its cache": (COLLECTED, "torch", "1\n"),
    "a region is collected while another is entered and left": (COLLECTED_AT_ENDS, "torch", "1\n0 False\n"),
    "a region is collected during a hit": (COLLECTED_AT_A_HIT, "torch", "done\n"),
    "threads end inside regions and enter others as they end": (THREADS, "torch._dynamo", "at the end\n"),
}


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize(("program", "imports", "printed"), PROGRAMS.values(), ids=PROGRAMS)
def test_regions_that_end_where_nobody_leaves_them(run_program, engine, program, imports, printed):
    assert run_program(HEAD + program, engine, imports=imports) == (0, printed, "")


LEFT = """
import weakref

class Enters:
    def __del__(self):
        region = polycast.autocast("cpu")
        region.__enter__()
        left.append(weakref.ref(region))

def end_late(local):
    with polycast.autocast("cpu"):
        pass
    local.value = Enters()

def use():
    with polycast.autocast("cpu"):
        pass

def run(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    del args
    thread.join()

left = []
run(end_late, threading.local())
for _ in range(1000):  # Python says that a thread has ended somewhat before it has
    run(use)
    gc.collect()
    if left[0]() is None:
        break
print([reference() for reference in left])
"""


def test_deferred_destruction_of_an_ended_thread_runs_on_the_next_one(run_program):
    assert run_program(HEAD + LEFT, "native") == (0, "[None]\n", "")


@pytest.mark.parametrize("order", [1, -1], ids=["oldest first", "newest first"])
def test_thousands_of_suspended_regions_are_left_in_any_order(engine, order):
    def suspended():
        with polycast.autocast("cpu"):
            yield

    generators = [suspended() for _ in range(5000)]
    for generator in generators:
        next(generator)
    assert polycast.autocast_nesting("cpu") == 5000
    for generator in generators[::order]:
        assert torch.is_autocast_enabled("cpu")
        generator.close()
    assert (polycast.autocast_nesting("cpu"), torch.is_autocast_enabled("cpu")) == (0, False)


@pytest.mark.parametrize("new", [True, False], ids=["a new region each time", "one region"])
def test_regions_are_left_where_recursion_is_too_deep(engine, new):
    region = polycast.autocast("cpu")

    def recur():
        with polycast.autocast("cpu") if new else region:
            recur()

    def recur_after(calls):
        recur_after(calls - 1) if calls else recur()

    for calls in range(6):  # what is called when there is no room left is another thing for each
        with pytest.raises(RecursionError):
            recur_after(calls)
        assert (polycast.autocast_nesting("cpu"), torch.is_autocast_enabled("cpu")) == (0, False)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_threads_caches_weights_generators_and_forks_together(run_program, engine, seed):
    program = Path(__file__).with_name("stress.py").read_text()
    result = run_program(program, engine, 100, 100 * seed, 30, imports="torch._dynamo", timeout=600)
    assert result[:2] == (0, "400 steps, 0 children failed\n"), result[2]


CAPTURES = """
class Capturing(type(polycast.plugin.get_backend("cpu"))):
    def is_capturing(self):
        return False

polycast.plugin.register_backend(Capturing())
with polycast.autocast("cpu"):
    print(torch.mm(X.float(), weight()).dtype)
"""


def test_a_process_may_exit_with_the_kernels_of_a_backend_that_says_whether_it_captures(run_program, engine):
    status, output, errors = run_program(HEAD + CAPTURES, engine)
    assert (status, output) == (0, "torch.bfloat16\n"), errors
