"""The CPU's kernels for few rows in the fast dtype: at least as exact as torch's, on every instruction set."""

import itertools
import os
import random
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

import polycast
from polycast_plugins.quantize.cpu.few_rows import FewRowsMatmul, few_rows_availability
from polycast_plugins.testing.low_bit import run_prepacked

AVAILABLE = few_rows_availability()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no kernels here: {AVAILABLE.reason}")

SETS = ("plain", "avx2", "avx512")
SIMDS = range(torch.ops.polycast_cpu.best_simd() + 1 if AVAILABLE else 1)
FAST = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *FAST)
INF, NAN = torch.inf, torch.nan


@pytest.fixture(params=SIMDS, ids=SETS.__getitem__)
def simd(request):
    """Run a test on each set of instructions that the processor has."""
    return request.param


@pytest.fixture(params=["rows are dense", "columns are dense"])
def in_order(request):
    """Return a function that lays out a weight [N, K]."""
    return torch.Tensor.contiguous if request.param == "rows are dense" else lambda weight: weight.t().contiguous().t()


def linear(simd, x, weight, bias=None, dtype=torch.bfloat16, of_weight=None):
    """Compute F.linear by the kernel, with the weight cast to a dtype, by default that of the result."""
    kernel = FewRowsMatmul(simd).kernels()["aten::linear"]
    assert kernel.unsupported_reason(x, weight, bias) is None
    return run_prepacked(kernel, (weight.to(of_weight or dtype),), x, weight, bias, dtype=dtype)


def exact(x, weight, bias=None, dtype=torch.bfloat16, of_weight=None):
    """Return F.linear of the weight's cast in float64, and the error that float32 sums and one rounding may have."""
    x, weight = x.double(), weight.to(of_weight or dtype).double()
    sums = F.linear(x, weight, None if bias is None else bias.double())
    magnitude = F.linear(x.abs(), weight.abs(), None if bias is None else bias.double().abs())
    limits = torch.finfo(dtype)
    return sums, sums.abs() * limits.eps / 2 * 1.01 + magnitude * 2e-6 + limits.smallest_normal * limits.eps


def assert_exact(actual, x, weight, bias=None, of_weight=None):
    expected, error = exact(x, weight, bias, actual.dtype, of_weight)
    assert actual.shape == expected.shape
    off = ((actual.double() - expected).abs() / error).max().item()
    assert off <= 1, f"the error is {off:.3g} times the bound"


@pytest.mark.parametrize("part", range(8))
def test_random_products_are_exact_and_rows_alone_have_the_same_bits(simd, part):
    pick = random.Random(part)
    torch.manual_seed(part)
    for _ in range(50):
        rows, terms, columns = (
            pick.randint(1, 8),
            pick.choice((1, 7, 32, 70, 200, 1100, 2100)),
            pick.choice((1, 3, 33, 130, 1100)),
        )
        terms, columns = terms + pick.randrange(3), columns + pick.randrange(3)
        dtype, given, of_weight = pick.choice(FAST), pick.choice(FLOATS), pick.choice((None, torch.float32))
        x = torch.randn(rows, terms).to(given)
        weight = torch.randn(columns, terms) if pick.random() < 0.5 else torch.randn(terms, columns).t()
        bias = torch.randn(columns) if pick.random() < 0.5 else None
        actual = linear(simd, x, weight, bias, dtype, of_weight)
        assert_exact(actual, x, weight, bias, of_weight)
        for row in range(rows):
            assert torch.equal(linear(simd, x[row], weight, bias, dtype, of_weight), actual[row])


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("of_weight", [torch.bfloat16, torch.float32], ids=str)
def test_columns_have_the_same_bits_among_more_than_are_computed_at_once(simd, in_order, rows, of_weight):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 21), in_order(torch.randn(12300, 21))
    actual = linear(simd, x, weight, of_weight=of_weight)
    assert_exact(actual, x, weight, of_weight=of_weight)
    parts = [linear(simd, x, in_order(part), of_weight=of_weight) for part in weight.split(1000)]
    assert torch.equal(actual, torch.cat(parts, dim=1))


def test_threads_may_have_small_stacks(simd):
    before, products = threading.stack_size(128 * 1024), []
    try:
        x, weight = torch.randn(8, 64), torch.randn(64, 7000).t()
        thread = threading.Thread(target=lambda: products.append(linear(simd, x, weight)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert torch.equal(products[0], linear(simd, x, weight))


@pytest.mark.parametrize("dtype", FAST, ids=str)
def test_a_product_is_at_least_as_exact_as_torchs(simd, in_order, dtype):
    torch.manual_seed(0)
    ours = theirs = 0.0
    for rows, terms, columns in itertools.product((1, 4, 7), (64, 768, 3072), (64, 301)):
        x, weight = torch.randn(rows, terms).to(dtype), in_order(torch.randn(columns, terms))
        expected = exact(x, weight, dtype=dtype)[0]
        ours += (linear(simd, x, weight, dtype=dtype).double() - expected).square().mean().item() / terms
        theirs += (F.linear(x, weight.to(dtype)).double() - expected).square().mean().item() / terms
    assert ours <= theirs * 1.001


def test_denormal_and_very_large_values_are_neither_flushed_nor_saturated(simd, in_order, subtests):
    for scale in [1e-44, 1e-40, 1e-38, 1e-20, 1e18, 1e19]:
        with subtests.test(scale=scale):
            torch.manual_seed(0)
            x, weight = torch.randn(3, 70) * scale, in_order(torch.randn(33, 70).sign() * torch.rand(33, 70).add(0.5))
            assert_exact(linear(simd, x, weight), x, weight)
            assert_exact(linear(simd, x.sign(), weight * scale), x.sign(), weight * scale)


@pytest.mark.parametrize("values", [(INF,), (-INF,), (INF, -INF), (NAN,), (INF, NAN), (3e38, 3e38, 3e38)], ids=str)
def test_inf_nan_and_overflow_are_as_in_float32(simd, in_order, values, subtests):
    for dtype in FAST:
        with subtests.test(dtype=dtype):
            torch.manual_seed(0)
            x, weight = torch.randn(5, 70), in_order(torch.rand(33, 70) + 1)
            x[2, : len(values)] = torch.tensor(values)
            actual = linear(simd, x, weight, dtype=dtype)
            expected = F.linear(x, weight.to(dtype).float()).to(dtype)
            assert torch.equal(actual.isnan(), expected.isnan())
            assert torch.equal(actual.isinf(), expected.isinf())
            assert torch.equal(actual[2].nan_to_num(0), expected[2].nan_to_num(0))
            weight[7, 69] = values[0]
            assert torch.equal(
                linear(simd, x[:1], weight, dtype=dtype).isfinite(),
                F.linear(x[:1], weight.to(dtype).float()).to(dtype).isfinite(),
            )


STRIDES = {
    "dense": lambda rows, terms: torch.randn(rows, terms),
    "transposed": lambda rows, terms: torch.randn(terms, rows).t(),
    "expanded": lambda rows, terms: torch.randn(1, terms).expand(rows, terms),
    "one number": lambda rows, terms: torch.randn(1, 1).expand(rows, terms),
    "steps": lambda rows, terms: torch.randn(2 * rows, 3 * terms)[::2, ::3],
    "slice": lambda rows, terms: torch.randn(rows, terms + 3)[:, 1 : terms + 1],
    "overlapping": lambda rows, terms: torch.randn(rows + terms).as_strided((rows, terms), (1, 1)),
}


@pytest.mark.parametrize("strides", STRIDES)
def test_activations_have_any_strides_and_dtype(simd, strides, subtests):
    for dtype in FLOATS:
        with subtests.test(dtype=dtype):
            x, weight, bias = STRIDES[strides](5, 70).to(dtype), torch.randn(33, 70), torch.randn(33)
            assert_exact(linear(simd, x, weight, bias), x, weight, bias)


def test_activations_have_any_number_of_dimensions(simd, in_order, subtests):
    for shape in [(70,), (1, 70), (2, 3, 70), (2, 1, 3, 70), (0, 70), (2, 0, 70)]:
        with subtests.test(shape=shape):
            x, weight = torch.randn(shape), in_order(torch.randn(33, 70))
            actual = linear(simd, x, weight)
            matmul = FewRowsMatmul(simd).kernels()["aten::matmul"]
            cast = (weight.t().bfloat16(),)
            assert torch.equal(run_prepacked(matmul, cast, x, weight.t(), dtype=torch.bfloat16), actual)
            assert actual.shape == (*shape[:-1], 33)
            if actual.numel():
                assert_exact(actual, x, weight)


@pytest.mark.parametrize("turned", [False, True])
def test_a_cast_of_any_strides_is_right(simd, turned, subtests):
    for strides in ["slice", "transposed", "expanded", "steps"]:
        with subtests.test(strides=strides):
            weight = STRIDES[strides](33, 70) if not turned else STRIDES[strides](70, 33).t()
            cast = torch.empty_strided(weight.shape, weight.stride(), dtype=torch.bfloat16)
            if strides == "expanded":
                cast = weight.bfloat16()[:1].expand(33, 70) if not turned else weight.bfloat16()[:, :1].expand(33, 70)
                weight = cast.float()
            else:
                cast.copy_(weight)
            x = torch.randn(3, 70)
            actual = torch.ops.polycast_cpu.few_rows_linear(x, weight, None, cast, torch.bfloat16, simd)
            assert_exact(actual, x, weight)


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (2, -0.5), (0, 3), (0.25, 0)])
def test_addmm_applies_beta_and_alpha_before_it_rounds(simd, in_order, beta, alpha, subtests):
    for bias in [(33,), (1, 33), (5, 1), (5, 33), (1,), ()]:
        with subtests.test(bias=bias):
            torch.manual_seed(0)
            x, weight, added = torch.randn(5, 70), in_order(torch.randn(33, 70)), torch.randn(bias)
            args = (added if beta else added * NAN, x, weight.t(), beta, alpha)
            kernel = FewRowsMatmul(simd).kernels()["aten::addmm"]
            assert kernel.unsupported_reason(*args) is None
            actual = run_prepacked(kernel, (weight.t().bfloat16(),), *args, dtype=torch.bfloat16)
            expected = beta * added.double() + alpha * exact(x, weight)[0]
            torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("columns", [100, 1000])
def test_the_number_of_threads_makes_no_difference(simd, in_order, threads, columns):
    x, weight = torch.randn(3, 3000), in_order(torch.randn(columns, 3000))
    expected, before = linear(simd, x, weight), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(linear(simd, x, weight), expected)
    finally:
        torch.set_num_threads(before)


def test_the_best_instruction_set_is_used_by_default():
    assert FewRowsMatmul().constants == (torch.ops.polycast_cpu.best_simd(),)


X, WEIGHT, BIAS = torch.randn(5, 70), torch.randn(33, 70), torch.randn(33)
CALLS = {
    "linear": (torch.randn(2, 3, 70), WEIGHT, BIAS),
    "matmul": (torch.randn(2, 3, 70), WEIGHT.t()),
    "mm": (X, WEIGHT.t()),
    "addmm": (BIAS, X, WEIGHT.t(), 0.5, 2),
}


@pytest.mark.parametrize("op", CALLS)
def test_an_operator_is_as_its_fake_one(op):
    kernel, args = FewRowsMatmul().kernels()[f"aten::{op}"], CALLS[op]
    given = (*args, args[kernel.weight].bfloat16(), torch.bfloat16, *kernel.constants)
    torch.library.opcheck(kernel.operator, given, test_utils=("test_schema", "test_faketensor"))


def test_a_kernel_multiplies_the_cast_and_prepacks_nothing():
    assert all(kernel.uses_cast for kernel in FewRowsMatmul().kernels().values())
    assert not polycast.plugin.LowBitKernel.uses_cast


@pytest.mark.parametrize(
    ("reason", "args"),
    [
        ("there are more than 8 rows", (torch.ones(3, 3, 70), WEIGHT, None)),
        ("the weight is not a matrix", (X, WEIGHT[0], None)),
        ("the sizes do not fit", (X[:, 1:], WEIGHT, None)),
        ("the bias is not a vector of the output features", (X, WEIGHT, BIAS[1:])),
        (
            "neither the rows nor the columns of the weight are dense",
            (X, torch.ones(66, 210, dtype=torch.bfloat16)[::2, ::3], None),
        ),
    ],
)
def test_what_is_not_supported_has_a_reason(reason, args):
    assert FewRowsMatmul().kernels()["aten::linear"].unsupported_reason(*args) == reason


@pytest.mark.parametrize(
    ("cast", "message"),
    [
        (WEIGHT.half(), "expected a matrix in float32 or in the fast dtype, BFloat16; got 2 dimensions in Half"),
        (WEIGHT[None], "got 3 dimensions in Float"),
        (WEIGHT.bfloat16()[:, 1:], "the activations have 70 terms, the weight 69"),
    ],
)
def test_an_operator_rejects_a_cast_that_does_not_fit(cast, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.polycast_cpu.few_rows_linear(X, WEIGHT, None, cast, torch.bfloat16, 0)


def test_without_terms_the_product_is_the_bias(simd, in_order, subtests):
    for shape in [(3, 0), (2, 3, 0), (0,)]:
        with subtests.test(shape=shape):
            bias, weight = torch.arange(5.0), in_order(torch.empty(5, 0, dtype=torch.bfloat16))
            actual = torch.ops.polycast_cpu.few_rows_linear(
                torch.empty(shape), weight, bias, weight, torch.bfloat16, simd
            )
            assert torch.equal(actual, bias.bfloat16().expand(*shape[:-1], 5))


WITHOUT_MEMORY = """
import ctypes, pathlib, resource
import torch
from polycast_plugins.quantize.cpu.few_rows import few_rows_availability

assert few_rows_availability()
torch.set_num_threads(2)
x = torch.randn(1, 512)
weight = torch.randn(512, 4000).bfloat16().t()
multiply = torch.ops.polycast_cpu.few_rows_linear
torch.randn(4000, 400).sum()  # torch's threads exist
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000, limits[1]))
while malloc(100_000):
    pass
try:
    multiply(x, weight, None, weight, torch.bfloat16, 0)
except MemoryError:
    print("no memory")
resource.setrlimit(resource.RLIMIT_AS, limits)
product = multiply(x, weight, None, weight, torch.bfloat16, 0)
print(torch.equal(product[:, :32], multiply(x, weight[:32], None, weight[:32], torch.bfloat16, 0)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it limits the memory of a process as Linux does")
def test_a_lack_of_memory_is_an_error_and_leaves_torchs_threads_intact():
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # a thread would find an arena of its own
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY], env=environment, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout.splitlines()) == (0, ["no memory", "True"]), found.stderr
