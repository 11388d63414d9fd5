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

from polycast_plugins.quantize.cpu.few_rows import FewRowsMatmul

from .matmul_kinds import FEW_ROWS, LAYOUTS, SETS, SIMDS, FewRows

pytestmark = pytest.mark.skipif(not FEW_ROWS, reason=f"no kernels here: {FEW_ROWS.reason}")

FAST = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *FAST)
INF, NAN = torch.inf, torch.nan


@pytest.fixture(params=SIMDS, ids=SETS.__getitem__)
def simd(request):
    return request.param


@pytest.fixture(params=["rows are dense", "columns are dense"])
def in_order(request):
    """Return a function that lays out a weight [N, K]."""
    return torch.Tensor.contiguous if request.param == "rows are dense" else lambda weight: weight.t().contiguous().t()


@pytest.mark.parametrize("part", range(8))
def test_random_products_are_exact_and_rows_alone_have_the_same_bits(simd, part):
    pick = random.Random(part)
    torch.manual_seed(part)
    for _ in range(50):
        rows, terms = pick.randint(1, 8), pick.choice((1, 7, 15, 32, 63, 70, 200, 255, 1100, 2100)) + pick.randrange(3)
        columns = pick.choice((1, 3, 15, 33, 63, 130, 200, 1100)) + pick.randrange(3)
        dtype, given, of_weight = pick.choice(FAST), pick.choice(FLOATS), pick.choice((None, torch.float32))
        x = torch.randn(rows, terms).to(given)
        weight = torch.randn(columns, terms) if pick.random() < 0.5 else torch.randn(terms, columns).t()
        bias = torch.randn(columns) if pick.random() < 0.5 else None
        kind = FewRows(simd, of_weight)
        actual = kind.check(x, weight, bias, dtype)
        for row in range(rows):
            assert torch.equal(kind.linear(x[row], weight, bias, dtype), actual[row])


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("of_weight", [torch.bfloat16, torch.float32], ids=str)
def test_columns_have_the_same_bits_among_more_than_are_computed_at_once(simd, in_order, rows, of_weight):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 21), in_order(torch.randn(12300, 21))
    kind = FewRows(simd, of_weight)
    actual = kind.check(x, weight)
    parts = [kind.linear(x, in_order(part)) for part in weight.split(1000)]
    assert torch.equal(actual, torch.cat(parts, dim=1))


def test_threads_may_have_small_stacks(simd, in_thread):
    x, weight = torch.randn(8, 64), torch.randn(64, 7000).t()
    before = threading.stack_size(128 * 1024)
    try:
        product = in_thread(lambda: FewRows(simd).linear(x, weight))
    finally:
        threading.stack_size(before)
    assert torch.equal(product, FewRows(simd).linear(x, weight))


@pytest.mark.parametrize("dtype", FAST, ids=str)
def test_a_product_is_at_least_as_exact_as_torchs(simd, in_order, dtype):
    torch.manual_seed(0)
    ours = theirs = 0.0
    for rows, terms, columns in itertools.product((1, 4, 7), (64, 768, 3072), (64, 301)):
        x, weight = torch.randn(rows, terms).to(dtype), in_order(torch.randn(columns, terms))
        expected = FewRows(simd).exact(x, weight, dtype=dtype)[0]
        ours += (FewRows(simd).linear(x, weight, dtype=dtype).double() - expected).square().mean().item() / terms
        theirs += (F.linear(x, weight.to(dtype)).double() - expected).square().mean().item() / terms
    assert ours <= theirs * 1.001


def test_denormal_and_very_large_values_are_neither_flushed_nor_saturated(simd, in_order, subtests):
    for scale in [1e-44, 1e-40, 1e-38, 1e-20, 1e18, 1e19]:
        with subtests.test(scale=scale):
            torch.manual_seed(0)
            x, weight = torch.randn(3, 70) * scale, in_order(torch.randn(33, 70).sign() * torch.rand(33, 70).add(0.5))
            FewRows(simd).check(x, weight)
            FewRows(simd).check(x.sign(), weight * scale)


@pytest.mark.parametrize("values", [(INF,), (-INF,), (INF, -INF), (NAN,), (INF, NAN), (3e38, 3e38, 3e38)], ids=str)
def test_inf_nan_and_overflow_are_as_in_float32(simd, in_order, values, subtests):
    for dtype in FAST:
        with subtests.test(dtype=dtype):
            torch.manual_seed(0)
            x, weight = torch.randn(5, 70), in_order(torch.rand(33, 70) + 1)
            x[2, : len(values)] = torch.tensor(values)
            for _ in range(2):
                actual = FewRows(simd).linear(x, weight, dtype=dtype)
                expected = F.linear(x, weight.to(dtype).float()).to(dtype)
                assert torch.equal(actual.isnan(), expected.isnan())
                assert torch.equal(actual.isinf(), expected.isinf())
                assert torch.equal(actual[2].nan_to_num(0), expected[2].nan_to_num(0))
                weight[7, 69] = values[0]


@pytest.mark.parametrize("strides", ["slice", "transposed", "expanded", "steps"])
def test_a_cast_of_any_strides_is_right(simd, strides):
    def make(*shape):
        return torch.randn(shape).bfloat16()

    for cast in (LAYOUTS[strides](33, 70, make), LAYOUTS[strides](70, 33, make).t()):
        x = torch.randn(3, 70)
        actual = torch.ops.polycast_cpu.few_rows_linear(x, cast.float(), None, cast, torch.bfloat16, simd)
        FewRows(simd).compare(actual, x, cast.float(), None)


def test_the_best_instruction_set_is_used_by_default():
    assert FewRowsMatmul().constants == (torch.ops.polycast_cpu.best_simd(),)


X, WEIGHT, BIAS = torch.randn(5, 70), torch.randn(33, 70), torch.randn(33)


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
    bias, weight = torch.arange(5.0), in_order(torch.empty(5, 0, dtype=torch.bfloat16))
    for shape in [(3, 0), (2, 3, 0), (0,)]:
        with subtests.test(shape=shape):
            given = (torch.empty(shape), weight, bias, weight, torch.bfloat16)
            actual = torch.ops.polycast_cpu.few_rows_linear(*given, simd)
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
