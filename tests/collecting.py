"""Choose the tests that run: of three or more parameters, only combinations that hold each pair, unless with --full.

The longest tests run first.
"""

import gc
import itertools
from collections import defaultdict

import pytest

ENGINES_DIFFER = (
    "tests/core/engine",
    "tests/gpu",
    "tests/plugins/fastest/test_conversions.py",
    "tests/plugins/fastest/test_fastest_in_the_engine.py",
    "tests/plugins/fastest/test_pointwise.py",
    "tests/plugins/quantize/test_calibrated.py",
    "tests/plugins/testing/test_built_in.py",
)
"""The tests of what each engine implements."""

FIRST = (
    "tests/core/engine/test_writes_of_ops.py",
    "tests/examples/",
    "tests/test_npy_example.py",
)
"""The tests that take longest. They run first: at the end, the other processes would wait for the one that has them."""


def pytest_addoption(parser):
    parser.addoption("--installed", action="store_true", help="fail where polycast is imported from the source tree")
    parser.addoption("--full", action="store_true", help="run each combination of the parameters of a test")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without the garbage collector, which would search the syntax trees again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Refuse ids that differ between the processes of pytest-xdist; leave out what need not run; sort the others."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(
                f"{item.nodeid!r} holds an address, which each process has another of: pass ids=[...]"
            )
        if item.originalname == "test_import_leaves_torch_as_it_was":
            item.add_marker(pytest.mark.slow)  # the suite has no markers of this project
    yield  # and so leave out what -m and -k do not select
    left_out = set() if config.getoption("full") else beyond_pairs(items)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = sorted(
        (item for item in items if item not in left_out), key=lambda item: not item.nodeid.startswith(FIRST)
    )


def beyond_pairs(items):
    """Return the tests without which the others still run each pair of values of two parameters.

    Outside of ENGINES_DIFFER, a pair of an engine and another value is none: most values run on the native engine, and
    one on the reference engine.
    """
    combinations = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            combinations[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for name, same in combinations.items():
        apart = set() if name.startswith(ENGINES_DIFFER) else {"native", "reference"}
        ids = [item.callspec._idlist for item in same]  # of each parameter, as callspec.id joins them
        left_out.update(same[n] for n in redundant(ids, apart))
    return left_out


def redundant(combinations, apart=frozenset()):
    """Return the positions of combinations without which the others still hold all values, and all pairs of them.

    Args:
        combinations: the values of each, in the order of the parameters.
        apart: values whose pairs need not be held.
    """
    held = []
    for values in combinations:
        paired = [(n, value) for n, value in enumerate(values) if value not in apart]
        held.append({*enumerate(values), *itertools.combinations(paired, 2)})
    missing, others = set().union(*held), dict(enumerate(held))
    while missing:
        best = max(others, key=lambda n: len(others[n] & missing))  # the first of the best
        missing -= others.pop(best)
    return list(others)
