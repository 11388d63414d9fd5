"""Weights, and how often they are cast."""

import torch
from torch import nn

import polycast

X = torch.ones(4, 4, dtype=torch.bfloat16)
BYTES = 4 * 4 * 2


def parameter(value=1.0, **options):
    return nn.Parameter(torch.full((4, 4), value), **options)


def use(cache, weight, dtype=torch.bfloat16):
    with polycast.autocast("cpu", dtype, cache=cache):
        return torch.mm(X.to(dtype), weight)


def counts(cache):
    stats = cache.stats()
    return stats.hits, stats.misses


def count_casts(function):
    """Return how many casts a function makes, outside of dispatch modes."""
    with torch.profiler.profile(acc_events=True) as profile:
        function()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")
