"""Products of an activation and a weight, for tests of the recipe "fastest"."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

PRODUCTS = {
    "linear": (F.linear, (48, 16), (8, 16)),
    "linear of few rows": (F.linear, (4, 16), (24, 16)),
    "linear with a bias": (lambda x, w: F.linear(x, w, w[:, 0]), (3, 48, 16), (8, 16)),
    "linear of a view": (lambda x, w: F.linear(x, w.t()), (48, 8), (8, 16)),
    "mm": (torch.mm, (48, 16), (16, 8)),
    "mm of activations": (lambda x, w: torch.mm(x, (w * 2).t()), (48, 16), (8, 16)),
    "addmm": (lambda x, w: torch.addmm(w[0], x, w), (48, 16), (16, 8)),
    "addmm of a column": (lambda x, w: torch.addmm(x[:, :1], x, w, beta=0.5, alpha=2), (48, 16), (16, 8)),
    "addmm of a matrix": (lambda x, w: torch.addmm(x[:, :8], x, w, alpha=-1.5), (48, 16), (16, 8)),
    "matmul": (torch.matmul, (3, 48, 16), (16, 8)),
    "matmul of batches": (torch.matmul, (3, 4, 16), (3, 16, 8)),
    "matmul of activations": (lambda x, w: torch.matmul(x, (w * 1).mT), (3, 48, 16), (3, 8, 16)),
    "bmm": (torch.bmm, (3, 48, 16), (3, 16, 8)),
    "baddbmm": (lambda x, w: torch.baddbmm(x[:, :, :1], x, w, beta=2, alpha=0.5), (3, 48, 16), (3, 16, 8)),
    "conv1d": (lambda x, w: F.conv1d(x, w, w[:, 0, 0], padding=1), (3, 8, 40), (6, 8, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), (3, 8, 11, 9), (6, 8, 3, 2)),
    "conv2d padded": (lambda x, w: F.conv2d(x, w, padding="same"), (3, 8, 11, 9), (16, 8, 3, 3)),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], 1, (1, 0), 2, 4), (3, 8, 11, 9), (8, 2, 3, 2)),
    "conv3d": (lambda x, w: F.conv3d(x, w, w[:, 0, 0, 0, 0]), (2, 4, 5, 6, 7), (6, 4, 3, 2, 1)),
}
"""By name: a function of both, and their shapes."""

HEADS = (2, 3, 12, 16), (2, 3, 12, 16)
MASK = torch.arange(12) % 5 > torch.arange(12)[:, None] % 2 - 1


def attention(x, w, mask=None, **options):
    return F.scaled_dot_product_attention(x, x, w * 1, mask, **options)


def fused_attention(x, w, mask=None, **options):
    """Return an attention of operands in the fast dtype, which torch's fused kernels compute."""
    return attention(*(each.to(torch.get_autocast_dtype("cpu")) for each in (x, w)), mask, **options)


def attentions(name, function, shapes=HEADS):
    return {
        name: (function, *shapes),
        f"causal {name}": (functools.partial(function, is_causal=True, scale=0.3), *shapes),
        f"{name} with a mask": (lambda x, w: function(x, w, x.detach()[..., :12].flatten(0, -3)[0]), *shapes),
        f"{name} with a boolean mask": (functools.partial(function, mask=MASK), *shapes),
    }


ATTENTIONS = attentions("attention", attention)
FUSED_ATTENTIONS = attentions("fused attention", fused_attention)


def made(shapes, dtype=torch.float32, needed=(True, True)):
    """Return an activation and a weight."""
    torch.manual_seed(0)
    x = torch.randn(shapes[0]).to(dtype).requires_grad_(needed[0])
    return x, nn.Parameter(torch.randn(shapes[1]), requires_grad=needed[1])


def equal(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
