"""The recipe "fastest" on random sizes, values and strides: each way has the bits of its definition."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.plugins.quantize.matmul_kinds import FewRows
from torch import nn

import polycast
from polycast import Fastest, autocast

pytestmark = pytest.mark.usefixtures("engine", "no_grad")
CASES = 250
FAST = (torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")
MATRICES = ["linear", "mm", "addmm", "matmul"]


def ratios(way, fast):
    """Return the times of a machine where one way is the fastest by far, for kernels of few rows and all others."""
    found = {"bfloat16": 1e9, "float16": 1e9}
    names = {"kernel": f"{str(fast).removeprefix('torch.')}_kernel", "float32 kernel": "float32_kernel"}
    return found if way == "float32" else {**found, names[way]: 1e-6}


def values(pick, shape, dtype):
    """Return a tensor of values of one kind, with strides of one kind."""
    scale = pick.choice([1.0, 1.0, 1.0, 1e-3, 1e4, 1e30, 1e-30, 1e-39])
    tensor = torch.randn(shape) * scale
    for special in (INF, -INF, NAN, 0.0, 65504.0, 3e38):
        if pick.random() < 0.03:
            tensor.view(-1)[pick.randrange(tensor.numel())] = special
    tensor = tensor.to(dtype)
    layout = pick.choice(["dense", "transposed", "every second", "expanded"])
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if layout == "every second":
        return torch.stack([tensor, torch.full_like(tensor, 7.0)], -1)[..., 0]
    return tensor[:1].expand(shape) if layout == "expanded" else tensor


def random_call(pick, few_rows=False):
    """Return the name of an op, and arguments with random sizes, values and strides."""
    sizes = [1, 2, 3, 4, 7, 16, 33, 64]
    rows, inner, columns, batch = (pick.choice(sizes) for _ in range(4))
    others = ["bmm", "baddbmm", "conv1d", "conv2d", "scaled_dot_product_attention"]
    op = pick.choice(MATRICES if few_rows else [*MATRICES, *others])
    if few_rows:
        batch, rows, inner = *pick.choice([(1, 1), (1, 5), (1, 8), (2, 3), (8, 1)]), pick.choice([*sizes, 200])
    shapes = {
        "linear": [(batch, rows, inner), (columns, inner), (columns,)],
        "mm": [(rows, inner), (inner, columns)],
        "addmm": [(pick.choice([1, rows]), columns), (rows, inner), (inner, columns)],
        "matmul": [(batch, rows, inner), (inner, columns)],
        "bmm": [(batch, rows, inner), (batch, inner, columns)],
        "baddbmm": [(batch, rows, columns), (batch, rows, inner), (batch, inner, columns)],
        "conv1d": [(batch, inner, rows + 2), (columns, inner, 3)],
        "conv2d": [(2, inner, rows + 2, 5), (columns, inner, 3, 2)],
        "scaled_dot_product_attention": [(batch, 3, rows, inner), (batch, 3, columns, inner), (batch, 3, columns, 8)],
    }[op]
    weight = 2 if op in ("addmm", "baddbmm") else 1
    given = pick.choice([torch.float32, torch.float32, torch.bfloat16])
    args = [values(pick, shape, given if at == weight - 1 else torch.float32) for at, shape in enumerate(shapes)]
    if op == "linear" and pick.random() < 0.3:
        args[2] = None
    if pick.random() < 0.5:
        args[weight] = nn.Parameter(args[weight], requires_grad=False)
    return op, args


@pytest.mark.parametrize("fast", FAST, ids=str)
@pytest.mark.parametrize("way", ["float32", "kernel", "float32 kernel"])
def test_results_have_the_bits_of_the_definition(way, fast, profile_of, recipe_counts):
    """A float32 op whose result is rounded once; or the kernel of the backend on the weight or its cast."""
    recipe = Fastest(profile_of(overhead=1e-15, cast=1e-15, **ratios(way, fast)))
    few_rows = way != "float32"
    if few_rows and not polycast.plugin.recipe_kernels(polycast.plugin.get_backend("cpu"), Fastest()):
        pytest.skip("the CPU has no kernels of its own here")
    pick = random.Random(f"{way} {fast}")
    torch.manual_seed(0)
    with recipe_counts() as counts:
        for _ in range(CASES):
            op, args = random_call(pick, few_rows)
            function = getattr(torch, op, None) or getattr(F, op)
            with autocast("cpu", fast, recipe=recipe):
                ours = function(*args)
            if few_rows:
                scalars = (1, 1) if op == "addmm" else ()
                kind = FewRows(of_weight=torch.float32 if way == "float32 kernel" else None)
                expected = kind.run(op, *args, *scalars, dtype=fast)
            else:
                expected = function(*(None if arg is None else arg.float() for arg in args)).to(fast)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    name = f"{str(fast).removeprefix('torch.')} kernel" if way == "kernel" else way
    assert {record.recipe for record in counts.records()} == {f"fastest:{name}"}
