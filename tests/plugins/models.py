"""Models for the tests, defined in a line or two, and what measures them."""

import torch
from torch import nn

import polycast

FLOAT16 = {"tolerance": 1e-2, "dtype": torch.float16}
"""Arguments of `tune`."""


class Defined(nn.Module):
    """Calls a function with itself and its arguments; the modules and parameters in it are given by name."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Does(nn.Module):
    """Calls a function with its layers and arguments."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *args, **kwargs):
        return self.function(*self.layers, *args, **kwargs)


def scaled(factor, width=8, bias=False):
    """Return a block of two layers, with a value between them that is `factor` times as large."""
    up, down = nn.Linear(width, width, bias), nn.Linear(width, width, bias)
    with torch.no_grad():
        up.weight.mul_(factor)
        down.weight.mul_(1 / factor)
    return Defined(lambda self, x: x + self.down(self.up(x)), up=up, down=down)


def by_name(found):
    """Return the modules of a comparison or an explanation by name."""
    return {each.name: each for each in found.modules}


def distance(model, x, policy, **settings):
    """Return the relative error of the output under a policy, in a region."""
    with torch.no_grad():
        expected = model(x)
        with polycast.apply_policy(model, policy), polycast.autocast("cpu", **settings):
            output = model(x)
    return ((output.float() - expected).norm() / expected.norm()).item()
