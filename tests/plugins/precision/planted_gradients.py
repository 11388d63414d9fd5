"""A module whose backward is wrong in a region, and what compares the gradients of such models."""

import torch
from tests.plugins.models import Defined
from torch import nn

import polycast


class Wrong(torch.autograd.Function):
    """The identity, whose backward is wrong by 10 % in a region."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = 1.1 if torch.is_autocast_enabled("cpu") else 1.0
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


def planted():
    """Return a linear layer, after which the backward is wrong in a region."""
    weight = nn.Parameter(torch.randn(8, 8) / 8**0.5)
    return Defined(lambda self, x: Wrong.apply(torch.mm(x, self.weight.t())), weight=weight)


def mean_square(output):
    return output.float().square().mean()


def compare(model, x, loss=mean_square, **settings):
    settings = {"policy": {"linear": "fp32", "mm": "fp32"}, **settings}
    return polycast.compare(model, x, loss=loss, **settings)


def by_name(comparison):
    """Return the errors of gradients by name; those of the inputs of a module by its name."""
    return {each.name: each for each in comparison.gradients}
