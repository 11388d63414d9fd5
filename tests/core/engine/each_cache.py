"""Each way to cache something of a weight, and whether what is computed with it is right."""

import contextlib
import weakref

import pytest
import torch
from tests.core.rounding import Rounded
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

import polycast

SIZE = 4
X = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)


def frozen(value=1.0):
    return nn.Parameter(torch.full((SIZE, SIZE), value), requires_grad=False)


def product(weight):
    return torch.nn.functional.linear(X, weight)


def is_right(weight):
    """Return whether the result of an op is that of the weight's current values."""
    with torch.no_grad():
        return torch.allclose(product(weight).float(), weight.sum(1).expand(SIZE, SIZE), rtol=0.01, atol=0)


def check_in(region):
    def check(weight, times=3):
        for _ in range(times):
            with region():
                assert is_right(weight)

    return check


# Each way to cache something of a weight yields a function that uses a weight so many times.
@contextlib.contextmanager
def plain_region():
    with polycast.autocast("cpu"):
        yield check_in(contextlib.nullcontext)


@contextlib.contextmanager
def regions_with_cache():
    cache = polycast.WeightCache()
    yield check_in(lambda: polycast.autocast("cpu", cache=cache))


@contextlib.contextmanager
def regions_with_recipe():
    polycast.clear_autocast_cache()
    yield check_in(lambda: polycast.autocast("cpu", recipe=Rounded(min_size=1)))
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


def fill(alias, value):
    alias.fill_(value)


def copy_to(storage, value):
    storage.copy_(torch.full((SIZE, SIZE), value).untyped_storage())


ALIASES = {
    "data": (lambda weight: weight.data, fill),
    "a view of data": (lambda weight: weight.data.view(-1)[2:], fill),
    "detach() of data": (lambda weight: weight.data.detach(), fill),
    "a parameter of data": (lambda weight: nn.Parameter(weight.data), lambda alias, value: alias.data.fill_(value)),
    "an array": (lambda weight: weight.detach().numpy(), lambda alias, value: alias.fill(value)),
    "DLPack": (lambda weight: torch.from_dlpack(weight.detach()), fill),
    "the storage": (lambda weight: weight.untyped_storage(), copy_to),
    "set_": (lambda weight: torch.empty(0).set_(weight.detach()), fill),
    "a DLPack capsule": (lambda weight: from_dlpack(to_dlpack(weight.detach())), fill),
    "a weak reference to the storage": (
        lambda weight: weakref.ref(weight.untyped_storage()),
        lambda alias, value: copy_to(alias(), value),
    ),
    "a sparse tensor": (sparse, lambda alias, value: alias._values().fill_(value)),
    "a compressed sparse tensor": (sparse_rows, lambda alias, value: alias.values().fill_(value)),
}
"""Ways to make an alias of a weight that has no version counter with it, and to fill it."""
