"""What `observe(numerics=True)` counts, compared with counts by NumPy in float64."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import polycast

TINY = {
    torch.float16: 2.0**-14,
    torch.bfloat16: 2.0**-126,
    torch.float32: 2.0**-126,
    torch.float64: 2.0**-1022,
    torch.float8_e5m2: 2.0**-14,
    torch.float8_e4m3fn: 2.0**-6,
}
CASTS = [
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float64, torch.float16),
    (torch.float32, torch.float8_e5m2),
    (torch.float32, torch.float8_e4m3fn),
]
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x[: x.numel() // 3 * 3].view(3, -1).t(),
    "strided": lambda x: x[::3],
    "expanded": lambda x: x[:1000, None].expand(1000, 3),
    "0-dim": lambda x: x[0],
    "empty": lambda x: x[:0],
    "large": lambda x: x.repeat(12),
}


def _numbers(tensor):
    return tensor.detach().double().numpy()


def reference(values, dtype, before=None, source=None):
    """Return (count, amax, underflowed, overflowed, zeroed, nonfinite) of a cast, or of a result with finite inputs."""
    with np.errstate(all="ignore"):
        finite = np.isfinite(values if before is None else before)
        amax = float(np.abs(values if before is None else before)[finite].max(initial=0.0))
        subnormal = (values != 0) & (np.abs(values) < TINY[dtype])
        nonfinite = ~np.isfinite(values)
        if before is None:
            return values.size, amax, int(subnormal.sum()), int(nonfinite.sum()), 0, int(nonfinite.sum())
        zeroed = (values == 0) & (before != 0)
        underflowed = zeroed | (subnormal & (np.abs(before) >= TINY[source]))
        overflowed = nonfinite & finite
    counts = (underflowed.sum(), overflowed.sum(), zeroed.sum(), nonfinite.sum())
    return values.size, amax, *map(int, counts)


def counts_of(record):
    return record.count, record.amax, record.underflowed, record.overflowed, record.zeroed, record.nonfinite


def values_of(dtype):
    """Return bit patterns of all kinds: random ones, those around each bound, zeros, infinities and nans."""
    generator = torch.Generator().manual_seed(0)
    if dtype in (torch.float16, torch.bfloat16):
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    words, width = (torch.int32, 31) if dtype == torch.float32 else (torch.int64, 62)
    drawn = torch.randint(-(2**width), 2**width - 1, (20_000,), dtype=words, generator=generator).view(dtype)
    bounds = [2.0**-power for power in (6, 9, 10, 14, 15, 16, 17, 24, 25, 126, 133, 134, 149)]
    bounds += [2.0**-14 * (1 - 2.0**-11), 448, 464, 57344, 61440, 65504, 65520, 3.3895e38, 3.4028e38]
    around = torch.tensor(bounds, dtype=dtype).view(words)[:, None] + torch.arange(-3, 4, dtype=words)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0], dtype=dtype)
    small = torch.randn(20_000, dtype=dtype, generator=generator) * 1e-5
    return torch.cat([drawn, around.flatten().view(dtype), -around.flatten().view(dtype), special, small])


def the_record(seen, **fields):
    (record,) = [each for each in seen.numerics if all(getattr(each, name) == value for name, value in fields.items())]
    return record


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)


@pytest.mark.parametrize(("source", "target"), CASTS, ids=[f"{a}-{b}".replace("torch.", "") for a, b in CASTS])
def test_casts_are_counted(engine, source, target, subtests):
    for layout in LAYOUTS:
        with subtests.test(layout=layout):
            x = LAYOUTS[layout](values_of(source))
            with polycast.observe(numerics=True) as seen, polycast.autocast("cpu"):
                cast = x.to(target)
            if layout == "empty":
                assert seen.numerics == ()
                continue
            (record,) = seen.numerics
            assert counts_of(record) == reference(_numbers(cast), target, _numbers(x), source)
            assert (record.op, record.role, record.of) == ("aten::to.dtype", "forward", "activation")
            assert (record.source, record.dtype) == (str(source)[6:], str(target)[6:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_results_are_counted(engine, dtype, subtests):
    for layout in LAYOUTS:
        with subtests.test(layout=layout):
            x = LAYOUTS[layout](values_of(dtype))
            x = torch.where(x.isfinite(), x, 0)
            with polycast.observe(numerics=True) as seen, polycast.autocast("cpu"):
                result = x * 4
            if layout == "empty":
                assert seen.numerics == ()
                continue
            (record,) = seen.numerics
            assert counts_of(record) == reference(_numbers(result), dtype)
            assert (record.op, record.of, record.source) == ("aten::mul.Tensor", "result", "")


@pytest.mark.parametrize("count", [1, 31, 1000, 4097, 300_001])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16], ids=str)
def test_casts_of_weights_are_counted_as_they_are_made(engine, target, count):
    values = values_of(torch.float32)
    weight = torch.nn.Parameter(values.repeat(10)[:count, None].contiguous())
    with polycast.observe(numerics=True) as seen, polycast.autocast("cpu", target):
        torch.nn.functional.linear(torch.ones(1, 1, dtype=target), weight)
    record = the_record(seen, of="weight")
    expected = reference(_numbers(weight.to(target))[:, 0], target, _numbers(weight)[:, 0], torch.float32)
    assert counts_of(record) == expected


def test_casts_that_are_found_are_not_counted_again(engine):
    weight = torch.nn.Parameter(torch.ones(4, 4))
    cache = polycast.WeightCache()
    with polycast.observe(numerics=True) as seen, torch.no_grad():
        for _ in range(3):
            with polycast.autocast("cpu", cache=cache):
                torch.nn.functional.linear(torch.ones(1, 4).bfloat16(), weight)
    assert the_record(seen, of="weight").count == 16


def test_inf_that_an_op_was_given_is_no_overflow(engine):
    mask = torch.tensor([0.0, -float("inf")])
    with polycast.observe(numerics=True) as seen, polycast.autocast("cpu", torch.float16):
        mask + 1
        torch.ones(2).masked_fill(torch.tensor([True, False]), -float("inf"))
        mask.half().mul_(2)
        torch.ones(2).exp2().mul(1e39)
    assert {each.op: (each.overflowed, each.nonfinite) for each in seen.numerics} == {
        "aten::add.Tensor": (0, 1),
        "aten::masked_fill.Scalar": (0, 1),
        "aten::to.dtype": (0, 1),
        "aten::mul_.Tensor": (0, 1),
        "aten::exp2": (0, 0),
        "aten::mul.Tensor": (2, 2),
    }


def test_values_outside_of_regions_or_only_moved_or_widened_are_not_counted(engine):
    with polycast.observe(numerics=True) as seen:
        x = torch.ones(3, 3).mul(2).half()
        with polycast.autocast("cpu", torch.float16):
            x.t().contiguous().float().clone()
    assert seen.numerics == ()


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))


def test_gradients_belong_to_the_modules_that_computed(engine):
    model = _net()
    with polycast.observe(model, numerics=True) as seen:
        with polycast.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 16)).float().sum()
        (loss * 1e-6).backward()
    record = the_record(seen, role="backward", op="aten::mm", module="2")
    assert (record.count, record.dtype, record.of) == (8 * 32 + 4 * 32, "float16", "result")
    assert record.underflowed > 0.9 * record.count
    cast = the_record(seen, role="backward", source="float32")
    assert (cast.module, cast.count, cast.underflowed) == (None, 32, 32)


def _train(**checkpointed):
    model, x = _net(), torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
    with polycast.observe(model, numerics=True) as seen:
        with polycast.autocast("cpu", torch.float16):
            y = checkpoint(model, x, **checkpointed) if checkpointed else model(x)
            loss = y.float().square().mean()
        loss.backward()
    return set(seen.numerics)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_in_a_checkpoint_is_not_counted_again(engine, use_reentrant):
    assert _train(use_reentrant=use_reentrant) == _train()


def test_ops_of_compiled_code_that_torch_runs_are_counted(engine):
    model, x = _net(), torch.randn(4, 16)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    with polycast.observe(model, numerics=True) as seen:
        with polycast.autocast("cpu", torch.float16):
            loss = compiled(x).float().sum()
        loss.backward()
    matmuls = [each for each in seen.numerics if each.op in ("aten::mm", "aten::addmm") and each.of == "result"]
    assert {each.role for each in matmuls} == {"forward", "backward"}


def test_counts_of_threads_are_added_and_nested_observers_count_the_same(engine, in_thread):
    x = torch.full((5,), 1e-6)

    def cast():
        with polycast.autocast("cpu", torch.float16):
            x.half()
            x.double().float()

    with polycast.observe(numerics=True, threads="all") as outer:
        in_thread(cast)
        with polycast.observe(numerics=True) as inner, polycast.observe() as plain:
            cast()
    for seen, threads in ((outer, 2), (inner, 1)):
        half, single = the_record(seen, dtype="float16"), the_record(seen, dtype="float32")
        assert (half.count, half.underflowed, single.count) == (5 * threads, 5 * threads, 5 * threads)
    assert plain.numerics == ()


# ---- Products in a backward pass that underflow to zero


def test_zeros_of_products_underflow_unless_a_row_or_column_is_zero(engine):
    a, b = torch.full((4, 3), 2e-4), torch.full((3, 5), 2e-4)
    a[1], b[:, 2] = 0, 0
    left, right = a.half().requires_grad_(), torch.eye(3).half().requires_grad_()
    with polycast.observe(numerics=True) as seen:
        torch.mm(left, right).backward(torch.ones(4, 3).half() * 0)
        torch.mm(right, left.t()).backward(b[:, :4].half())
    record = the_record(seen, op="aten::mm")
    # Of the second one: the gradient of `right`, b[:, :4] @ a, and of left.t(), which is right.t() @ b[:, :4].
    product = b[:, :4].half().double() @ a.half().double()
    assert bool((product > 0).all())
    assert (record.zeroed, record.underflowed) == (0, int((product.abs() < TINY[torch.float16]).sum()))


def test_products_that_are_lost_are_counted(engine):
    left, right = torch.full((4, 3), 2e-5).half().requires_grad_(), torch.eye(3).half().requires_grad_()
    gradient = torch.full((4, 3), 2e-5)
    gradient[1] = 0
    with polycast.observe(numerics=True) as seen:
        torch.mm(left, right).backward(gradient.half())
    record = the_record(seen, op="aten::mm")
    # left.t() @ gradient is all lost; gradient @ right.t() has a row of zeros and 9 subnormal elements.
    assert (record.count, record.zeroed, record.underflowed) == (9 + 12, 9, 18)


def test_products_that_are_lost_in_batches_are_counted(engine):
    torch.manual_seed(0)
    left, right = (torch.randn(2, 4, 3) * 3e-4).half(), (torch.randn(2, 4, 3) * 3e-4).half()
    left[0, 1], left[1, :, 2], right[1, 2] = 0, 0, 0
    weight, x = torch.eye(4).half().expand(2, 4, 4).clone(), left.clone().requires_grad_()
    with polycast.observe(numerics=True) as seen:
        torch.bmm(weight.transpose(1, 2), x).backward(right)
        torch.bmm(x.transpose(1, 2), torch.zeros(2, 4, 5).half().requires_grad_()).backward(torch.ones(2, 3, 5).half())
    record = the_record(seen, op="aten::bmm")
    products = [weight.double() @ right.double(), torch.zeros(2, 4, 3), left.double() @ torch.ones(2, 3, 5).double()]
    exact = torch.cat([each.flatten() for each in products])
    rounded, nonzero = exact.half(), exact != 0
    assert record.zeroed == int(((rounded == 0) & nonzero).sum())
    assert record.underflowed == int(((rounded.abs() < TINY[torch.float16]) & nonzero).sum())


class _MultiplyInRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with polycast.autocast("cpu", torch.float16):
            return torch.mm(gradient, torch.eye(3) * 1e-6).float()


def test_products_of_inputs_that_autocast_casts_are_counted(engine):
    gradient = torch.full((2, 3), 1e-3)
    gradient[1] = 0
    with polycast.observe(numerics=True) as seen:
        _MultiplyInRegion.apply(torch.ones(2, 3, requires_grad=True)).backward(gradient)
    record = the_record(seen, op="aten::mm", of="result")
    assert (record.role, record.count, record.zeroed, record.underflowed) == ("backward", 6, 3, 3)


@pytest.mark.parametrize("length", [3, 63, 64, 65, 200])
@pytest.mark.parametrize("transposed", [False, True])
def test_zeros_of_products_of_sparse_values_are_not_lost(engine, length, transposed):
    """After ReLU an element of a small batch may have no product of two values that are not zero."""
    generator = torch.Generator().manual_seed(length)
    share = (2 / length) ** 0.5  # two products of each element on average
    left, right = (
        (torch.rand(shape, generator=generator) < share)
        * torch.where(torch.rand(shape, generator=generator) < 0.5, 1, 1e-6)
        for shape in ((20, length), (length, 300))
    )
    left, right = left.half(), right.half()
    if transposed:
        left, right = left.t().contiguous().t(), right.t().contiguous().t()
    with polycast.observe(numerics=True) as seen:
        torch.mm(left.t(), torch.zeros(20, 300).half().requires_grad_()).backward(right)
    record = the_record(seen, op="aten::mm")
    result, products = left @ right, left.ne(0).double() @ right.ne(0).double()
    assert 0 < int((products == 0).sum()) < products.numel()
    assert record.zeroed == int(((result == 0) & (products != 0)).sum()) > 0
