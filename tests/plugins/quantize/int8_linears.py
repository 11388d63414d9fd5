"""Linears in regions with int8, and what they return."""

import torch
from torch import nn

from polycast import Int8, autocast

X = torch.randn(3, 8)
INT8 = Int8(min_size=1)


def run(function, *args, recipe=INT8, **settings):
    """Call a function in a region with the recipe; a layer, by default, with X."""
    if isinstance(function, nn.Module) and not args:
        args = (X,)
    with autocast("cpu", recipe=recipe, **settings):
        return function(*args)


def expected(layer, x=X):
    """Return what int8 makes of a layer; or of a product by a matrix with a row for each output feature."""
    weight, bias = (layer, None) if isinstance(layer, torch.Tensor) else (layer.weight, layer.bias)
    scale = weight.abs().amax(1).clamp(min=1e-30) / 127
    return nn.functional.linear(x, (weight / scale[:, None]).round() * scale[:, None], bias).bfloat16()
