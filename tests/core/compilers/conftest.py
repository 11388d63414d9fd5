"""Fixtures for compiled code, and workarounds for older versions of torch."""

import os
from pathlib import Path

import pytest
import torch

import polycast


def pytest_collection_modifyitems(config, items):
    leave_out_graphs_that_others_run(config, items, Path(__file__).parent)


def leave_out_graphs_that_others_run(config, items, folder):
    """Mark tests with inductor as slow, and leave out those on the reference engine: aot_eager runs the same graphs."""
    left_out = []
    for item in items:
        if item.path.parent != folder or not hasattr(item, "callspec"):
            continue
        values = [value for value in item.callspec.params.values() if isinstance(value, str)]
        if "inductor" in values:
            item.add_marker(pytest.mark.slow)
            if "reference" in values:
                left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def _main_thread_compiles_first():
    """Compile something: torch 2.11 crashes if another thread compiles after the first that did has ended."""
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Reset Dynamo, and the setting by which it does not compile the callees of code compiled with fullgraph=True.

    When threads call such code at once, one may restore the setting of another, and then it stays.
    """
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    eval_frame = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_eval_frame_override"):
        eval_frame.set_eval_frame_override(eval_frame._EvalFrameOverride.NONE)


@pytest.fixture
def cache():
    """Return a cache that compares a cast with its weight at every hit."""
    return polycast.WeightCache(verify=True)


@pytest.fixture(scope="session")
def run_with_inductor(start_launcher):
    """Return a function that runs a script in a process, with inductor's caches on disk."""
    environment = {**os.environ, "TORCHINDUCTOR_AUTOGRAD_CACHE": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    launched = start_launcher("import torch._dynamo.repro.after_dynamo, torch._inductor.compile_fx", environment)

    def run(script, *arguments, **more):
        done = launched(script, *arguments, environment={**environment, **more})
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(params=["aot_eager", "inductor"])
def backend(request):
    """Run a test with each backend that makes graphs of ATen ops; those of aot_eager run as they are."""
    return request.param


@pytest.fixture
def in_region():
    """Return a function that calls another in a region."""

    def in_region(function, *args, cache=None, **settings):
        with polycast.autocast("cpu", cache=cache, **settings):
            return function(*args)

    return in_region


@pytest.fixture
def data():
    """Return an input and a layer for it."""
    torch.manual_seed(0)
    return torch.randn(3, 8), torch.nn.Linear(8, 8)
