"""Layers in regions with a cache, for tests of saved caches."""

import torch

from polycast import Int8, autocast

INT8 = Int8(min_size=1)


def run(model, cache, recipe=None):
    with autocast("cpu", cache=cache, recipe=recipe):
        return model(torch.ones(2, 8))
