"""Exactness of the recipe "fastest": every way against float64, beside the fast dtype's kernel of torch."""

import random

import pytest
import torch
import torch.nn.functional as F

from polycast import Fastest, autocast

SEEDS = 40
CASES = 50
"""The cases for each seed."""


@pytest.fixture(scope="module")
def float32_way(profile_of):
    """Return the recipe for a machine where only float32 is fast."""
    return Fastest(profile_of(overhead=1e-15, cast=1e-15, bfloat16=1e9, float16=1e9))


def values(pick, shape, dtype):
    """Return a tensor of values of one kind, with strides of one kind."""
    scale = pick.choice([1.0, 1.0, 1.0, 1e-3, 1e4, 1e30, 1e-30, 1e-39])
    tensor = torch.randn(shape) * scale
    for special in (float("inf"), float("-inf"), float("nan"), 0.0, 65504.0, 3e38):
        if pick.random() < 0.05 and tensor.numel():
            tensor.view(-1)[pick.randrange(tensor.numel())] = special
    tensor = tensor.to(dtype)
    layout = pick.choice(["dense", "transposed", "every second", "expanded"])
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if layout == "every second":
        return torch.stack([tensor, torch.full_like(tensor, 7.0)], -1)[..., 0]
    if layout == "expanded" and len(tensor):
        return tensor[:1].expand(shape)
    return tensor


def call(pick):
    """Return a function of an op, with random arguments."""
    rows, inner, columns, batch = (pick.choice([1, 2, 3, 4, 7, 16, 33, 64]) for _ in range(4))
    dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16])
    op = pick.choice(["linear", "mm", "addmm", "matmul", "bmm", "conv1d", "conv2d"])
    if op == "linear":
        tensors = [(batch, rows, inner), (columns, inner), (columns,)]
    elif op == "mm":
        tensors = [(rows, inner), (inner, columns)]
    elif op == "addmm":
        tensors = [(pick.choice([1, rows]), columns), (rows, inner), (inner, columns)]
    elif op == "matmul":
        tensors = [(batch, rows, inner), (inner, columns)]
    elif op == "bmm":
        tensors = [(batch, rows, inner), (batch, inner, columns)]
    elif op == "conv1d":
        tensors = [(batch, inner, rows + 2), (columns, inner, 3)]
    else:
        tensors = [(2, inner, rows + 2, 5), (columns, inner, 3, 2)]
    function = getattr(F, op) if op in ("linear", "conv1d", "conv2d") else getattr(torch, op)
    args = [values(pick, shape, dtype if at == 0 else torch.float32) for at, shape in enumerate(tensors)]
    if len(tensors[-1]) == 1:
        args[-1] = torch.randn(columns)
    return function, args


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float16], ids=str)
def test_every_way_is_as_exact_as_torchs_kernel(float32_way, fast, seed):
    pick = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(CASES // 2):
        function, args = call(pick)
        exact = function(*[arg.double() for arg in args])
        with torch.no_grad(), torch.autocast("cpu", fast):
            torchs = function(*args)
        with torch.no_grad(), autocast("cpu", fast, recipe=float32_way):
            ours = function(*args)
        assert (ours.dtype, ours.shape) == (fast, exact.shape)
        rounded = exact.to(fast)
        # Where the exact result is no number, so is ours; where torch's is one, so is ours.
        assert bool(ours[exact.isnan()].isnan().all())
        lost = rounded.isfinite() & ~ours.isfinite()
        assert not bool((lost & torchs.isfinite()).any())
        both = rounded.isfinite() & ours.isfinite() & torchs.isfinite()
        error, of_torch = ((each.double() - exact)[both].norm() for each in (ours, torchs))
        assert error <= 1.01 * of_torch + 1e-3 * exact[both].norm() * torch.finfo(fast).eps + 1e-30


def test_a_row_has_the_same_bits_in_any_batch_of_one_way(float32_way):
    torch.manual_seed(0)
    weight, x = torch.randn(64, 48), torch.randn(1024, 48)
    with torch.no_grad(), autocast("cpu", recipe=float32_way):
        whole = F.linear(x, weight)
        for rows in (1024, 1000, 513):
            part = F.linear(x[:rows], weight)
            assert int((part != whole[:rows]).sum()) == 0
