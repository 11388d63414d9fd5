"""Other threads, the garbage collector and forks in the middle of an op, which casts what it reads and writes."""

import functools
import gc
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

import polycast
from polycast import autocast
from polycast.plugin import events

from .cached_casts import parameter
from .each_cache import SETTINGS
from .modes import CAST, AtOp

BFLOAT16 = torch.bfloat16
X = torch.linspace(-1, 2, 12).reshape(4, 3)
POLICIES = {"match": {}, "fp32": {"batch_norm": "fp32"}}
"""Policies of a region, both of which cast the running statistics of a batch norm."""
HALF = functools.partial(dict, dtype=torch.float16)


def stats():
    return torch.zeros(3, dtype=BFLOAT16), torch.ones(3, dtype=BFLOAT16)


def normalize(x, mean, var, training=True):
    return F.batch_norm(x, mean, var, torch.ones(3, requires_grad=True), training=training, momentum=0.5)


def orbits(steps):
    """Return the means and variances after each number of steps, rounded after each."""
    mean, var = stats()
    found = [(mean.tolist(), var.tolist())]
    for _ in range(steps):
        casts = mean.float(), var.float()
        normalize(X, *casts)
        mean, var = (each.bfloat16() for each in casts)
        found.append((mean.tolist(), var.tolist()))
    return tuple(map(list, zip(*found, strict=True)))


def meanwhile(function):
    """Return a context manager that calls a function once, when autograd saves the first tensor of an op."""
    calls = iter([function])

    def pack(tensor):
        if (call := next(calls, None)) is not None:
            call()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("training", [False, True], ids=["reads", "trains"])
def test_the_last_thread_that_writes_statistics_decides_their_values(engine, in_thread, policy, training):
    mean, var = stats()
    means, variances = orbits(1)

    def other():
        with autocast("cpu", policy=POLICIES[policy]):
            y = normalize(X + 4, mean, var, training)
            casts = [each.float() for each in stats()]
            assert torch.equal(y, normalize(X + 4, *casts, training))

    with autocast("cpu", policy=POLICIES[policy]), meanwhile(lambda: in_thread(other)):
        y = normalize(X, mean, var)
    assert (mean.tolist(), var.tolist()) == (means[1], variances[1])
    assert (mean._version, var._version) == (0, 0)
    y.sum().backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_that_share_statistics_see_values_of_a_step(engine, policy):
    steps, trainers = 40, 3
    mean, var = stats()
    # Threads may see the channels at different steps.
    channels = [list(zip(*each, strict=True)) for each in orbits(steps * trainers)]
    start, problems = threading.Barrier(trainers + 2), []

    def steps_of(tensor, values):
        pairs = zip(tensor.tolist(), values, strict=True)
        return [each.index(value) if value in each else None for value, each in pairs]

    def run(training):
        start.wait()
        for _ in range(steps):
            with autocast("cpu", policy=POLICIES[policy]):
                y = normalize(X, mean, var, training)
            seen = steps_of(mean, channels[0]) + steps_of(var, channels[1])
            if not y.isfinite().all() or None in seen:
                problems.append((y, seen))

    with ThreadPoolExecutor(trainers + 2) as threads:
        list(threads.map(run, [True] * trainers + [False] * 2))
    assert problems == []
    assert all(steps_of(mean, channels[0]))


def leave_when_collected(call, settings):
    """Call a function in a region of a generator that is suspended, and that only the garbage collector finds."""

    def generator():
        with autocast("cpu", **settings):
            call()
            yield

    cycle = [generator()]
    next(cycle[0])
    cycle.append(cycle)


@torch.no_grad()
def product(weight, multiply=torch.mm):
    return multiply(torch.ones(4, 4), weight)


WEIGHT, FOURS = parameter(), torch.full((4, 4), 4.0, dtype=BFLOAT16)
CALLS = {
    "a functional op": (lambda: X.lerp(X.bfloat16(), 0.5), lambda: X.lerp(X.bfloat16().float(), 0.5), HALF),
    "an op that writes": (
        lambda: X.bfloat16().index_add_(0, torch.tensor([2]), X[:1]),
        lambda: X.bfloat16().index_add_(0, torch.tensor([2]), X[:1].bfloat16()),
        HALF,
    ),
    "an op that writes statistics": (
        lambda: (mean := stats()[0], normalize(X, mean, stats()[1]))[0],
        lambda: (mean := stats()[0].float(), normalize(X, mean, stats()[1].float()))[0].bfloat16(),
        HALF,
    ),
    "a region": (lambda: autocast("cpu", torch.float16)(FOURS.clone)(), FOURS.clone, HALF),
    "an op that makes a cast": (lambda: product(parameter()), FOURS.clone, SETTINGS["cache"]),
    "an op that finds a cast": (lambda: product(WEIGHT), FOURS.clone, dict),
    "an op of a recipe": (lambda: product(WEIGHT, F.linear), FOURS.clone, SETTINGS["recipe"]),
}
"""By name: call an op in a region, compute its result by hand, and make the settings of the region."""


@pytest.mark.usefixtures("int8_kernels")
@pytest.mark.parametrize("name", CALLS)
def test_a_region_may_be_collected_anywhere_in_an_op(engine, name):
    call, by_hand, settings = CALLS[name]
    expected = by_hand()
    gc.collect()
    thresholds = gc.get_threshold()
    try:
        for allocations in itertools.count(1):
            gc.set_threshold(0)
            with autocast("cpu"):
                leave_when_collected(call, settings())
                gc.set_threshold(allocations)
                found = call()
                gc.set_threshold(0)
                was_collected = polycast.autocast_nesting("cpu") == 1
                gc.collect(0)
                assert (polycast.autocast_nesting("cpu"), torch.get_autocast_dtype("cpu")) == (1, BFLOAT16)
            assert polycast.autocast_nesting("cpu") == 0
            assert found.dtype is expected.dtype
            assert torch.equal(found, expected)
            if not was_collected:
                break
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("when", ["before the casts", "between the casts", "in the op"])
def test_a_region_may_be_left_in_a_matched_op(engine, when):
    x, y = X.clone().requires_grad_(), X.bfloat16()
    region = autocast("cpu").__enter__()

    def leave(*_):
        events.matched_call.remove(leave)
        region.__exit__(None, None, None)

    if when == "before the casts":
        events.matched_call.add(leave)
    modes = {"before the casts": AtOp(CAST), "between the casts": AtOp(CAST, leave), "in the op": meanwhile(leave)}
    with modes[when]:
        found = torch.dot(x[0], y[0])
    assert (polycast.autocast_nesting("cpu"), torch.is_autocast_enabled("cpu")) == (0, False)
    assert torch.equal(found, torch.dot(X[0], y[0].float()))
    found.backward()
    assert torch.equal(x.grad[0], y[0].float())


FORKED = """
import os, threading
import torch
from torch.nn import functional as F
import polycast

torch.set_num_threads(1)  # a child cannot use the threads of torch's team
x, policy = torch.linspace(-1, 2, 12).reshape(4, 3), {"batch_norm": "fp32"} if POLICY else {}
mean, var = torch.zeros(3).bfloat16(), torch.ones(3).bfloat16()
begun, go_on = threading.Event(), threading.Event()


def pack(tensor):
    begun.set()
    go_on.wait()
    return tensor


def train():
    with polycast.autocast("cpu", policy=policy):
        F.batch_norm(x, mean, var, torch.ones(3, requires_grad=True), training=True, momentum=0.5)


def train_slowly():
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train()


train()
first = mean.clone()
thread = threading.Thread(target=train_slowly)
thread.start()
begun.wait()
child = os.fork()
if not child:
    is_unchanged = torch.equal(mean, first)
    train()
    os._exit(0 if is_unchanged and not torch.equal(mean, first) else 1)
status = os.waitpid(child, 0)[1]
print(status, torch.equal(mean, first))
go_on.set()
thread.join()
print(torch.equal(mean, first))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fork_in_the_middle_of_a_matched_op_leaves_the_child_usable(run_program, engine, policy):
    program = FORKED.replace("POLICY", str(bool(POLICIES[policy])))
    assert run_program(program, engine, timeout=60) == (0, "0 True\nFalse\n", "")
