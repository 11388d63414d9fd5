"""Linears in regions with int8, and what they return."""

import torch
from torch import nn

from polycast import Int8, autocast

X = torch.randn(3, 8)


def run(layer, x=X, **settings):
    with autocast("cpu", recipe=Int8(min_size=1), **settings):
        return layer(x)


def expected(layer, x=X):
    scale = layer.weight.abs().amax(1).clamp(min=1e-30) / 127
    rows = (layer.weight / scale[:, None]).round() * scale[:, None]
    return nn.functional.linear(x, rows, layer.bias).bfloat16()
