"""Writes through aliases that share no version counter with the weight: .data, arrays, storages, sparse tensors."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import swap_tensors
from torch.utils.dlpack import from_dlpack, to_dlpack

import polycast

from .each_cache import (
    SIZE,
    frozen,
    is_right,
    plain_region,
    product,
    regions_with_cache,
    regions_with_recipe,
    sparse,
    sparse_rows,
    with_each_cache,
)

pytestmark = [
    pytest.mark.usefixtures("engine", "int8_kernels"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]

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
    "a DLPack capsule": (
        lambda weight: from_dlpack(to_dlpack(weight.detach())),
        lambda alias, value: alias.fill_(value),
    ),
    "a weak reference to the storage": (
        lambda weight: weakref.ref(weight.untyped_storage()),
        lambda alias, value: alias().copy_(torch.full((SIZE, SIZE), value).untyped_storage()),
    ),
    "a sparse tensor": (sparse, lambda alias, value: alias._values().fill_(value)),
    "a compressed sparse tensor": (sparse_rows, lambda alias, value: alias.values().fill_(value)),
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


@pytest.mark.parametrize(
    ("regions", "alias"),
    [
        *((plain_region, alias) for alias in ("data", "an array", "the storage")),
        *((regions, "data") for regions in (regions_with_cache, regions_with_recipe)),
    ],
)
def test_writes_through_an_alias_older_than_polycasts_hooks_are_seen(regions, alias):
    alias_of, write = ALIASES[alias]
    polycast.uninstall()
    weight = frozen()
    alias = alias_of(weight)
    with regions() as region:
        for turn in range(4):
            for _ in range(2):
                with region():
                    assert is_right(weight)
            write(alias, float(turn + 2))
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
            from_dlpack(to_dlpack(weight)).fill_(turn + 9)
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
@pytest.mark.parametrize("swap", [torch.utils.swap_tensors, swap_tensors], ids=["attribute", "name"])
def test_a_cached_frozen_weight_can_be_swapped(regions, swap):
    weight = frozen()
    with regions() as region:
        for _ in range(3):
            with region():
                assert is_right(weight)
        swap(weight, frozen(5.0))
        assert weight[0, 0] == 5
        for _ in range(3):
            with region():
                assert is_right(weight)
