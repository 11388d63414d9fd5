"""Each way to cache something of a weight, and whether what is computed with it is right."""

import contextlib

import pytest
import torch
from tests.core.rounding import Rounded
from torch import nn

import polycast

SIZE = 4
X = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)


def frozen(value=1.0):
    return nn.Parameter(torch.full((SIZE, SIZE), value), requires_grad=False)


def product(weight):
    return torch.nn.functional.linear(X, weight)


def is_right(weight):
    """Return whether the result of an op is that of the weight's current value."""
    with torch.no_grad():
        out = product(weight)
        expected = SIZE * weight.detach()[0, 0].float()
    assert torch.equal(out, out[0, 0].expand_as(out))
    return abs(out[0, 0].item() - expected.item()) <= 0.01 * abs(expected.item())


# Each way to cache something of a weight yields a function that returns the context of one use.
@contextlib.contextmanager
def plain_region():
    with polycast.autocast("cpu"):
        yield lambda: contextlib.nullcontext()


@contextlib.contextmanager
def regions_with_cache():
    cache = polycast.WeightCache()
    yield lambda: polycast.autocast("cpu", cache=cache)


@contextlib.contextmanager
def regions_with_recipe():
    polycast.clear_autocast_cache()
    yield lambda: polycast.autocast("cpu", recipe=Rounded(min_size=1))
    polycast.clear_autocast_cache()


CACHES = {
    "a plain region": plain_region,
    "a cache": regions_with_cache,
    "a recipe": regions_with_recipe,
}
SETTINGS = {
    "plain": dict,
    "cache": lambda: {"cache": polycast.WeightCache()},
    "recipe": lambda: {"recipe": Rounded(min_size=1), "cache": polycast.WeightCache()},
}
"""The same as settings of a region."""
with_each_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
with_each_cache = pytest.mark.parametrize("regions", CACHES.values(), ids=CACHES)


def sparse_rows(weight):
    rows = torch.arange(0, SIZE * SIZE + 1, SIZE)
    columns = torch.arange(SIZE).repeat(SIZE)
    values = weight.detach().view(-1)
    return torch.sparse_csr_tensor(rows, columns, values, (SIZE, SIZE), check_invariants=True)


def sparse(weight):
    return torch.sparse_coo_tensor(torch.arange(SIZE)[None], weight.detach(), check_invariants=True)
