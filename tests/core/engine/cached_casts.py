"""Weights whose casts regions with a cache use."""

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
