"""Mappings of other classes than dict as arguments of a module under the rule "fp32", and of a function that casts."""

from collections import ChainMap
from collections.abc import MutableMapping
from types import MappingProxyType

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")


def reduced(*values):
    return torch.tensor(values, dtype=torch.bfloat16)


class Shared(MutableMapping):
    """A mapping whose copies share its items."""

    def __init__(self, items):
        self.held = items

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value

    def __delitem__(self, key):
        del self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_the_maps_of_a_chain_keep_their_items(call):
    x, y, hidden = reduced(-1, 2), reduced(3), reduced(4)
    first, second = {"x": x}, MappingProxyType({"x": hidden, "y": y})
    third = {"y": reduced(5), "z": [y]}
    chain = ChainMap(first, second, third)

    def forward(given):
        assert given is chain
        assert {given["x"].dtype, given["y"].dtype, given["z"][0].dtype} == {torch.float32}
        given["x"].relu_()
        given["new"] = given["y"]

    call(forward, chain)
    assert list(first) == ["x", "new"]
    assert first["x"] is x
    assert first["new"] is y
    assert chain.maps[1] is second
    assert third["z"][0] is y
    assert third["y"].dtype is torch.bfloat16
    assert x.tolist() == [0, 2]


def test_a_mapping_whose_copies_share_its_items_stays_itself(call):
    x = reduced(-1, 2)
    given = Shared({"x": x})

    def forward(lent):
        assert lent is given
        lent["x"].relu_()
        return lent["x"].dtype

    assert call(forward, given) is torch.float32
    assert given["x"] is x
    assert x.tolist() == [0, 2]


@pytest.mark.parametrize(
    "make", [lambda x: ChainMap({}, {"x": x}), lambda x: Shared({"x": x})], ids=["chain", "shared"]
)
def test_a_function_with_cast_inputs_leaves_the_items_of_other_mappings(make):
    class Twice(torch.autograd.Function):
        @staticmethod
        @polycast.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, given):
            assert given["x"].dtype is torch.float32
            return given["x"] * 2

    x = reduced(1, 2)
    given = make(x)
    with polycast.autocast("cpu"):
        Twice.apply(given)
    assert given["x"] is x
    assert len(given) == 1
    if isinstance(given, ChainMap):
        assert given.maps[0] == {}


def test_a_chain_of_maps_with_another_constructor_keeps_its_items():
    class Named(ChainMap):
        def __init__(self, name, *maps):
            super().__init__(*maps)
            self.name = name

    class Sum(torch.autograd.Function):
        @staticmethod
        @polycast.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, given):
            assert (type(given), given.name, [*map(sorted, given.maps)]) == (Named, "both", [["a"], ["b"]])
            return given["a"] + given["b"]

    given = Named("both", {"a": reduced(1)}, {"b": reduced(2)})
    with polycast.autocast("cpu"):
        assert Sum.apply(given).dtype is torch.float32
    assert given["a"].dtype is torch.bfloat16
