"""Fixtures for compiled code, and workarounds for older versions of torch."""

from pathlib import Path

import pytest
import torch

import polycast

WITH_BOTH_ENGINES = "test_cached_casts_unwritten.py"
"""Here inductor must not write the memory of casts, which each engine makes in its own way."""


def pytest_collection_modifyitems(config, items):
    """Leave out inductor with the reference engine: it compiles the same graphs, and aot_eager runs them there."""
    params = {item: getattr(getattr(item, "callspec", None), "params", {}) for item in items}
    left_out = [
        item
        for item in items
        if item.path.parent == Path(__file__).parent
        and item.path.name != WITH_BOTH_ENGINES
        and {"reference", "inductor"} <= {value for value in params[item].values() if isinstance(value, str)}
    ]
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
