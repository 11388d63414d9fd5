"""Which tests run: of three or more parameters only combinations that hold each pair of values, unless with --full."""

import itertools
from collections import defaultdict

import pytest


def pytest_addoption(parser):
    parser.addoption("--installed", action="store_true", help="fail where polycast is imported from the source tree")
    parser.addoption("--full", action="store_true", help="run each combination of the parameters of a test")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Refuse ids that differ between the processes of pytest-xdist; leave out what need not run."""
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
    items[:] = [item for item in items if item not in left_out]


def beyond_pairs(items):
    """Return the tests without which the others still run each pair of values of two parameters."""
    combinations = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            combinations[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for same in combinations.values():
        ids = [item.callspec._idlist for item in same]  # of each parameter, as callspec.id joins them
        left_out.update(same[n] for n in redundant(ids))
    return left_out


def redundant(combinations):
    """Return the positions of combinations without which the others still hold each pair of values that any holds.

    Args:
        combinations: the values of each, in the order of the parameters.
    """
    pairs = [set(itertools.combinations(enumerate(values), 2)) for values in combinations]
    if len(combinations[0]) < 3:
        return []
    missing, others = set().union(*pairs), dict(enumerate(pairs))
    while missing:
        best = max(others, key=lambda n: len(others[n] & missing))  # the first of the best
        missing -= others.pop(best)
    return list(others)
