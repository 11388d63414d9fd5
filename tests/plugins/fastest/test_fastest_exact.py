"""Exactness of the recipe "fastest": every way, element by element, against float64 and torch's fast-dtype kernel."""

import random
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polycast
from polycast import Fastest, autocast
from polycast_plugins.fastest.fastest_plan import onednn_supports

pytestmark = pytest.mark.usefixtures("engine", "no_grad")
CASES = 250
FAST = (torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")
SUM_ERROR = 4e-6
"""The error of a sum in float32, relative to the sum of the magnitudes; roundings to bfloat16 have 2e-3."""
UNDERFLOW = 2.0**-140
"""The same of products that are denormal: a hundredth of bfloat16's smallest number."""
LARGEST = torch.finfo(torch.float32).max


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


class Call(NamedTuple):
    """A function of an op, its arguments, and which of them is the weight."""

    function: object
    args: list
    weight: int = 1

    def of(self, convert, of_weight=None):
        """Call the function with converted arguments."""
        converters = [(of_weight or convert) if at == self.weight else convert for at in range(len(self.args))]
        pairs = zip(converters, self.args, strict=True)
        return self.function(*(None if arg is None else convert(arg) for convert, arg in pairs))


MATRICES = ["linear", "mm", "addmm", "matmul"]


def random_call(pick, few_rows=False):
    """Return a call with random sizes, values and strides."""
    sizes = [1, 2, 3, 4, 7, 16, 33, 64]
    rows, inner, columns, batch = (pick.choice(sizes) for _ in range(4))
    op = pick.choice(MATRICES if few_rows else [*MATRICES, "bmm", "baddbmm", "conv1d", "conv2d"])
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
    }[op]
    weight = 2 if op in ("addmm", "baddbmm") else 1
    given = pick.choice([torch.float32, torch.float32, torch.bfloat16])
    args = [values(pick, shape, given if at == weight - 1 else torch.float32) for at, shape in enumerate(shapes)]
    if op == "linear" and pick.random() < 0.3:
        args[2] = None
    if pick.random() < 0.5:
        args[weight] = nn.Parameter(args[weight], requires_grad=False)
    return Call(getattr(F, op) if op in ("linear", "conv1d", "conv2d") else getattr(torch, op), args, weight)


class Compared(NamedTuple):
    """The elements of many results: ours, torch's, those in float64 of what is multiplied and of what was given, and
    the sums of the magnitudes of finite terms.
    """

    ours: torch.Tensor
    torchs: torch.Tensor
    reference: torch.Tensor
    exact: torch.Tensor
    magnitude: torch.Tensor


def compared(calls, fast, recipe, has_cast):
    """Compute calls in each way.

    Args:
        calls: the calls.
        fast: the fast dtype.
        recipe: ours.
        has_cast: whether ours multiplies the cast of the weight.
    """
    with autocast("cpu", fast, recipe=recipe):
        ours = [call.function(*call.args) for call in calls]
    polycast.uninstall()
    with torch.autocast("cpu", fast):
        torchs = [call.function(*call.args) for call in calls]
    exact = [call.of(torch.Tensor.double) for call in calls]
    of_casts = [call.of(torch.Tensor.double, lambda weight: weight.to(fast).double()) for call in calls]
    magnitude = [call.of(lambda arg: arg.double().abs().nan_to_num(0, 0, 0)) for call in calls]
    for one, other in zip(ours, exact, strict=True):
        assert (one.dtype, one.shape) == (fast, other.shape)
    return Compared(
        *(
            torch.cat([each.flatten() for each in tensors])
            for tensors in (ours, torchs, of_casts if has_cast else exact, exact, magnitude)
        )
    )


def assert_nearest(found, fast):
    """Check that each element is the number of the fast dtype that is the nearest to the exact one.

    Torch's can be no nearer. Sums in float32 have errors, and may overflow where the exact ones do not: with terms of
    both signs even to the other side.
    """
    error = found.magnitude * SUM_ERROR + UNDERFLOW
    rounded, size = found.reference.to(fast), found.reference.abs()
    assert bool(found.ours[found.reference.isnan()].isnan().all())
    is_inf = found.reference.isinf()
    assert not bool(found.ours[is_inf].isfinite().any())
    assert bool((found.ours == rounded)[is_inf & (found.magnitude < LARGEST)].all())
    overflows = (size - error).to(fast).isinf() & ~is_inf
    assert not bool(found.ours[overflows].isfinite().any())
    of_other_sign = (found.magnitude - size) / 2
    assert bool((found.ours == rounded)[overflows & (of_other_sign < LARGEST)].all())
    fits = (size + error).to(fast).isfinite() & (found.magnitude < LARGEST)
    assert bool(found.ours[fits].isfinite().all())
    both = rounded.isfinite() & found.ours.isfinite()
    off = (found.ours.double() - found.reference).abs() - (rounded.double() - found.reference).abs()
    assert float((off / error)[both].max()) <= 2
    kinds = (is_inf, found.reference.isnan(), overflows, both, both & (size < UNDERFLOW * 2**12) & (size > 0))
    assert min(int(each.sum()) for each in kinds) > 10  # each kind was there


def relative_error(result, found):
    """Return the error of a result, relative to the magnitudes, where those are moderate."""
    moderate = (found.magnitude > 1e-3) & (found.magnitude < 1e4) & found.ours.isfinite() & found.torchs.isfinite()
    error = (result.double() - found.exact) / found.magnitude
    return float(error[moderate].square().mean().sqrt())


@pytest.mark.parametrize("fast", FAST, ids=str)
@pytest.mark.parametrize("way", ["float32", "kernel", "float32 kernel"])
def test_each_element_is_the_nearest_to_the_exact_one(way, fast, profile_of, recipe_counts):
    recipe = Fastest(profile_of(overhead=1e-15, cast=1e-15, **ratios(way, fast)))
    few_rows = way != "float32"
    if few_rows and not polycast.plugin.recipe_kernels(polycast.plugin.get_backend("cpu"), Fastest()):
        pytest.skip("the CPU has no kernels of its own here")
    pick = random.Random(f"{way} {fast}")
    torch.manual_seed(0)
    calls = [random_call(pick, few_rows) for _ in range(CASES)]
    with autocast("cpu", fast, recipe=recipe), recipe_counts() as counts:
        for call in calls[:50]:
            call.function(*call.args)
    name = f"{str(fast).removeprefix('torch.')} kernel" if way == "kernel" else way
    assert {record.recipe for record in counts.records()} == {f"fastest:{name}"}
    found = compared(calls, fast, recipe, has_cast=way == "kernel")
    assert_nearest(found, fast)
    assert relative_error(found.ours, found) <= 1.001 * relative_error(found.torchs, found)


# ---- Attention and recurrent layers, whose results are no sums of products.


def norm(errors):
    return torch.cat([each.flatten() for each in errors]).norm()


@pytest.mark.parametrize("fast", FAST, ids=str)
def test_attention_is_the_nearest_to_the_exact_one(fast, float32_way):
    pick = random.Random(0)
    torch.manual_seed(0)
    ours_off, torchs_off = [], []
    for _ in range(60):
        batch, heads, rows, keys, features = (pick.choice([1, 2, 3, 5, 8, 17, 33]) for _ in range(5))
        scale, given = pick.choice([1e-3, 1.0, 1.0, 3.0]), pick.choice([torch.float32, fast])
        query = (torch.randn(batch, heads, rows, features) * scale).to(given)
        key, value = ((torch.randn(batch, heads, keys, features) * scale).to(given) for _ in range(2))
        kind = pick.choice(["none", "causal", "added", "bool"])
        mask = {"added": torch.randn(rows, keys), "bool": torch.rand(rows, keys).tril(keys) > 0.3}.get(kind)
        if kind == "bool":
            mask[:, 0] = True  # a row without keys has no result
        options = {"attn_mask": mask, "is_causal": kind == "causal"}
        exact_mask = mask.double() if kind == "added" else mask
        exact = F.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), **{**options, "attn_mask": exact_mask}
        )
        with autocast("cpu", fast, recipe=float32_way):
            ours = F.scaled_dot_product_attention(query, key, value, **options)
        with torch.autocast("cpu", fast):
            torchs = F.scaled_dot_product_attention(query.to(fast), key.to(fast), value.to(fast), **options)
        scores = (query.double() @ key.double().mT).abs().max() / features**0.5 + 4
        error = SUM_ERROR * scores * value.double().abs().max() + UNDERFLOW
        assert ours.dtype is fast
        off = (ours.double() - exact).abs() - (exact.to(fast).double() - exact).abs()
        assert float((off / error).max()) <= 2
        weight = 1 / value.double().abs().max()
        ours_off.append((ours.double() - exact) * weight), torchs_off.append((torchs.double() - exact) * weight)
    assert norm(ours_off) <= 1.001 * norm(torchs_off)


@pytest.mark.skipif(not onednn_supports(torch.bfloat16), reason="regions compute LSTMs in float32 here")
def test_recurrent_layers_are_the_nearest_to_the_exact_ones(float32_way):
    pick, fast = random.Random(0), torch.bfloat16
    torch.manual_seed(0)
    for _ in range(20):
        steps, batch, features, hidden = (pick.choice([1, 2, 3, 5, 8, 17]) for _ in range(4))
        layer = nn.LSTM(
            features, hidden, pick.choice([1, 2]), bias=pick.random() < 0.5, bidirectional=pick.random() < 0.5
        )
        exact_layer = nn.LSTM(
            features, hidden, layer.num_layers, bias=layer.bias, bidirectional=layer.bidirectional
        ).double()
        exact_layer.load_state_dict(layer.state_dict())
        x = torch.randn(steps, batch, features) * pick.choice([1e-3, 1.0, 3.0])
        exact, (exact_hidden, exact_cell) = exact_layer(x.double())
        with autocast("cpu", fast, recipe=float32_way):
            ours, (ours_hidden, ours_cell) = layer(x)
        # The states between layers and steps of time are float32; those between ops have the fast dtype.
        for one, other in ((ours, exact), (ours_hidden, exact_hidden), (ours_cell, exact_cell)):
            assert one.dtype is fast
            allowed = torch.finfo(fast).eps if layer.num_layers > 1 else 1e-5
            off = (one.double() - other).abs() - (other.to(fast).double() - other).abs()
            assert float(off.max()) <= 2 * allowed


# ---- Rows in batches.

BATCHES = {
    **{
        f"linear {shape}": (lambda x, w: F.linear(x, w), (1024, shape[1]), shape)
        for shape in [(64, 48), (48, 64), (256, 256), (33, 70), (512, 128)]
    },
    "mm": (lambda x, w: torch.mm(x, w), (1024, 64), (64, 48)),
    "bmm": (lambda x, w: torch.bmm(x[:, None], w[: len(x)]), (256, 32), (256, 32, 16)),
    "conv2d": (lambda x, w: F.conv2d(x, w), (64, 16, 9, 9), (32, 16, 3, 3)),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_row_has_the_same_bits_in_any_batch_of_one_way(case, float32_way):
    function, *shapes = BATCHES[case]
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) for shape in shapes)
    in_float32, checked = function(x, weight), 0
    with autocast("cpu", recipe=float32_way):
        whole = function(x, weight)
        for rows in (1, 2, 3, 4, 8, 17, len(x) // 2 + 1, len(x) - 24, len(x)):
            part = function(x[:rows], weight)
            with autocast("cpu", enabled=False):  # torch has other kernels for one row or two
                is_same_kernel = torch.equal(function(x[:rows], weight), in_float32[:rows])
            if is_same_kernel:
                checked += 1
                assert int((part != whole[:rows]).sum()) == 0
    assert checked > 3
