"""Writes through aliases that share no version counter with the weight: .data, arrays, storages, pointers."""

import contextlib
import ctypes

import numpy as np
import pytest
import torch
from torch import nn

import polycast

pytestmark = pytest.mark.usefixtures("engine", "int8_kernels")

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
    yield lambda: polycast.autocast("cpu", recipe=polycast.Int8(min_size=1))
    polycast.clear_autocast_cache()


CACHES = {
    "a plain region": plain_region,
    "a cache": regions_with_cache,
    "a recipe": regions_with_recipe,
}
with_each_cache = pytest.mark.parametrize("regions", CACHES.values(), ids=CACHES)


def add_to_data(weight):
    weight.data += 1


def write_row(weight):
    for row in range(SIZE):
        weight.data[row] = 3.0


def write_in_array(weight):
    weight.detach().numpy()[:] = 3


def write_as_array(weight):
    np.asarray(weight.detach())[:] = 3


def write_by_dlpack(weight):
    np.from_dlpack(weight.detach())  # read-only in NumPy; torch writes it
    torch.from_dlpack(weight.detach()).fill_(3)


def write_by_capsule(weight):
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).fill_(3)


def write_in_storage(weight):
    weight.untyped_storage().copy_(torch.full((SIZE, SIZE), 3.0).untyped_storage())


def write_in_typed_storage(weight):
    weight.detach().storage()[0 : SIZE * SIZE] = 3.0


def write_at_pointer(weight):
    threes = torch.full((SIZE, SIZE), 3.0)
    ctypes.memmove(weight.data_ptr(), threes.data_ptr(), threes.nbytes)


def write_in_a_custom_op(weight):
    with torch.library._scoped_library("polycast_test", "FRAGMENT") as library:
        library.define("write_(Tensor(a!) x) -> ()")
        library.impl("write_", lambda x: x.detach().numpy().fill(3), "CPU")
        torch.ops.polycast_test.write_(weight.detach())


def write_where_versions_are_preserved(weight):
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.fill_(3)


WRITES = {
    "data += 1": add_to_data,
    "data.add_": lambda weight: weight.data.add_(1),
    "data[i] =": write_row,
    "data.view(-1)": lambda weight: weight.data.view(-1).fill_(3),
    "data of data": lambda weight: weight.data.data.fill_(3),
    "data of detach()": lambda weight: weight.detach().data.fill_(3),
    "data of a view": lambda weight: weight.view(-1).data.fill_(3),
    "foreach": lambda weight: torch._foreach_add_([weight.data], 1.0),
    "out=": lambda weight: torch.add(X.float(), 2, out=weight.data),
    "a parameter of data": lambda weight: nn.Parameter(weight.data, requires_grad=False).fill_(3),
    "set_": lambda weight: torch.empty(0).set_(weight.detach()).fill_(3),
    "numpy()": write_in_array,
    "numpy.asarray": write_as_array,
    "DLPack": write_by_dlpack,
    "a DLPack capsule": write_by_capsule,
    "untyped_storage()": write_in_storage,
    "storage()": write_in_typed_storage,
    "data_ptr()": write_at_pointer,
    "a custom op in Python": write_in_a_custom_op,
    "a preserved version": write_where_versions_are_preserved,
}


@with_each_cache
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_seen(regions, write):
    weight = frozen()
    with regions() as region:
        for turn in range(3):
            for _ in range(3):
                with region():
                    assert is_right(weight)
            with torch.no_grad():
                weight.fill_(turn - 5.0)
            for _ in range(3):
                with region():
                    assert is_right(weight)
            write(weight)
            with region():
                assert is_right(weight)


ALIASES = {
    "data": (lambda weight: weight.data, lambda alias, value: alias.fill_(value)),
    "a view of data": (lambda weight: weight.data.view(-1)[2:], lambda alias, value: alias.fill_(value)),
    "detach() of data": (lambda weight: weight.data.detach(), lambda alias, value: alias.fill_(value)),
    "a parameter of data": (lambda weight: nn.Parameter(weight.data), lambda alias, value: alias.data.fill_(value)),
    "an array": (lambda weight: weight.detach().numpy(), lambda alias, value: alias.fill(value)),
    "DLPack": (lambda weight: torch.from_dlpack(weight.detach()), lambda alias, value: alias.fill_(value)),
    "the storage": (
        lambda weight: weight.untyped_storage(),
        lambda alias, value: alias.copy_(torch.full((SIZE, SIZE), value).untyped_storage()),
    ),
    "set_": (lambda weight: torch.empty(0).set_(weight.detach()), lambda alias, value: alias.fill_(value)),
}


@with_each_cache
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize(("alias_of", "write"), ALIASES.values(), ids=ALIASES)
def test_writes_through_a_live_alias_are_seen(regions, made, alias_of, write):
    weight = frozen()
    polycast.install("cpu")
    alias = alias_of(weight) if made == "before" else None
    with regions() as region:
        if made == "after":
            for _ in range(3):
                with region():
                    assert is_right(weight)
            alias = alias_of(weight)
        for turn in range(4):
            write(alias, float(turn + 2))
            if alias.__class__ is torch.Tensor and alias.numel() < weight.numel():
                weight.data.view(-1)[:2] = turn + 2
            for _ in range(3):
                with region():
                    assert is_right(weight)


@pytest.mark.parametrize("alias", ["data", "an array", "the storage"])
def test_writes_through_an_alias_older_than_polycasts_hooks_are_seen_in_a_plain_region(alias):
    alias_of, write = ALIASES[alias]
    polycast.uninstall()
    weight = frozen()
    alias = alias_of(weight)
    with polycast.autocast("cpu"):
        for turn in range(4):
            assert is_right(weight)
            assert is_right(weight)
            write(alias, float(turn + 2))
        assert is_right(weight)


@pytest.mark.parametrize("regions", [regions_with_cache, regions_with_recipe])
def test_writes_through_an_alias_older_than_polycasts_hooks_are_seen_with_a_cache(regions):
    polycast.uninstall()
    weight = frozen()
    alias = weight.data
    with regions() as region:
        for turn in range(4):
            for _ in range(2):
                with region():
                    assert is_right(weight)
            alias.fill_(turn + 2)
            with region():
                assert is_right(weight)


def test_a_plain_region_caches_no_frozen_weight_on_the_memory_of_an_array():
    array = np.ones((SIZE, SIZE), np.float32)
    weight = nn.Parameter(torch.from_numpy(array), requires_grad=False)
    with polycast.autocast("cpu"):
        for _ in range(4):
            assert is_right(weight)
            assert is_right(weight)
            array += 1
        assert is_right(weight)


def test_writes_of_a_weight_are_seen_once_it_is_frozen_inside_a_region():
    weight = nn.Parameter(torch.ones(SIZE, SIZE))
    alias = weight.data
    with polycast.autocast("cpu"):
        product(weight), product(weight)
        alias.fill_(3)  # of which a region of torch's sees nothing either, while the weight requires grad
        del alias
        weight.requires_grad_(False)
        assert is_right(weight)


def test_a_write_is_seen_in_grad_mode_with_a_cache():
    weight = nn.Parameter(torch.ones(SIZE, SIZE))
    alias = weight.data
    with polycast.autocast("cpu", cache=polycast.WeightCache()):
        for turn in range(4):
            assert product(weight)[0, 0] == SIZE * weight[0, 0].item()
            assert product(weight)[0, 0] == SIZE * weight[0, 0].item()
            alias.fill_(turn + 2)
        del alias
        for turn in range(4):
            assert product(weight)[0, 0] == SIZE * weight[0, 0].item()
            assert product(weight)[0, 0] == SIZE * weight[0, 0].item()
            weight.data.fill_(turn + 7)
        assert product(weight)[0, 0] == SIZE * weight[0, 0].item()


def merge_adapter(layer, a, b):
    """Do what PEFT does to merge low-rank matrices into the layer that they adapt."""
    delta = (b @ a).to(layer.weight.dtype)
    layer.weight.data += delta


def test_an_adapter_merged_inside_a_region_takes_effect():
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False).requires_grad_(False)
    a, b, x = torch.randn(4, 16), torch.randn(16, 4), torch.randn(2, 16)
    with torch.no_grad(), polycast.autocast("cpu"):
        for _ in range(3):
            layer(x)
        with torch.autocast("cpu", enabled=False):
            merge_adapter(layer, a, b)
        merged = layer(x)
    assert torch.equal(merged, layer.bfloat16()(x.bfloat16()))


@with_each_cache
def test_a_cached_frozen_weight_can_be_swapped(regions):
    weight = frozen()
    with regions() as region:
        for _ in range(3):
            with region():
                assert is_right(weight)
        torch.utils.swap_tensors(weight, frozen(5.0))
        assert weight[0, 0] == 5
        for _ in range(3):
            with region():
                assert is_right(weight)
