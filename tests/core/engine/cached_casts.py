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
    return events(function).get("aten::copy_", 0)


def events(function):
    """Return how often a function calls each op, by its name."""
    with torch.profiler.profile(acc_events=True) as profile:
        function()
    return {event.key: event.count for event in profile.key_averages()}


def casts_in_region(*weights, **settings):
    """Return how many casts a region makes in which weights are used, one after the other."""

    def run():
        with polycast.autocast("cpu", **settings):
            for weight in weights:
                torch.mm(X, weight)

    return count_casts(run)
