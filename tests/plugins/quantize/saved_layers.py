"""Layers in regions with a cache, and the values of models, for tests of what is saved."""

import torch

from polycast import Int8, autocast

INT8, X = Int8(min_size=1), torch.linspace(-1, 1, 16).view(2, 8)


def run(model, cache, recipe=None, dtype=None, x=X):
    with autocast("cpu", dtype, cache=cache, recipe=recipe):
        return model(x)


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_state(model, expected):
    found = model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(bytes_of(found[name]), bytes_of(value)), name


def bytes_of(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)
