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


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_threads_end_inside_regions_and_enter_others_as_they_end(run_program, engine):
    assert run_program(HEAD + THREADS, engine, imports="torch._dynamo") == (0, "at the end\n", "")


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
