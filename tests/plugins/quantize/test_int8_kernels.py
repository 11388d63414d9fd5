"""The CPU's int8 matmuls: the bits of their definition on every instruction set; inf, nan, refused calls."""

import random
import sys

import pytest
import torch

from polycast_plugins.quantize.cpu.int8 import Int8Matmul

from .low_bit_calls import run_kernel
from .matmul_kinds import INT8, LAYOUTS, Int8, Int8OneScale

pytestmark = pytest.mark.skipif(not INT8, reason=f"no int8 here: {INT8.reason}")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = torch.inf, torch.nan
SPECIAL = (INF, -INF, NAN, 0.0, -0.0, 1e-45, 1e-40, 1e-30, 1e30, 3e38)


def linear(by_row, isa=None):
    return Int8Matmul(by_row, isa).kernels()["aten::linear"]


def matrices(rows):
    """Return activations and a weight without zeros, whose signs survive quantizing."""
    x, weight = torch.randn(rows, 130), torch.randn(70, 130)
    return x, weight.sign() * (weight.abs() + 0.1)


def random_matrix(pick, rows, columns, dtype):
    """Return a matrix of random strides, magnitudes and special values."""

    def make(*shape):
        matrix = torch.randn(shape) * 10 ** pick.uniform(-4, 4)
        if pick.random() < 0.3:
            matrix *= 10 ** torch.empty(shape[0], 1).uniform_(-12, 12)
        return matrix.to(dtype)

    return LAYOUTS[pick.choice(("dense", "transposed", "slice", "steps", "expanded"))](rows, columns, make)


def scattered(pick, matrix, values):
    matrix = matrix.clone()
    for _ in range(pick.randint(1, 6)):
        matrix[pick.randrange(matrix.shape[0]), pick.randrange(matrix.shape[1])] = pick.choice(values)
    return matrix


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
def test_random_products_have_the_bits_of_the_definition(isa, threads, part):
    pick = random.Random(1000 * threads + part)
    torch.manual_seed(1000 * threads + part)
    torch.set_num_threads(threads)
    for _ in range(60):
        rows = pick.choice((1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 32, 33, 70, 257))
        terms = pick.choice((1, 2, 3, 4, 5, 7, 8, 9, 31, 63, 64, 65, 67, 200, 255, 256, 257, 500, 1030))
        columns = pick.choice((1, 7, 15, 63, 64, 65, 130, 300))
        given, packed, wanted = (pick.choice(FLOATS) for _ in range(3))
        x, weight = random_matrix(pick, rows, terms, given), random_matrix(pick, columns, terms, packed)
        if pick.random() < 0.3:
            x = scattered(pick, x, SPECIAL)
        if pick.random() < 0.2:
            weight = scattered(pick, weight, (0.0, -0.0, 1e-45, 1e-40, 1e-30))
        if pick.random() < 0.5:  # levels at both ends, which would saturate 16 bits
            x, weight = x.sign() * 3, weight.sign()
        if weight.isfinite().all():
            bias = torch.randn(columns).to(pick.choice(FLOATS)) if pick.random() < 0.5 else None
            (Int8 if pick.random() < 0.7 else Int8OneScale)(isa).check(x, weight, bias, wanted)


@pytest.mark.parametrize("kind", [Int8, Int8OneScale])
def test_rows_of_nothing_but_inf_or_nan_are_right(kind):
    x, weight = torch.full((3, 130), INF), matrices(1)[1]
    x[1], weight[5] = NAN, weight[5].abs()
    assert kind().check(x, weight, torch.ones(70))[0, 5] == INF


def test_inf_meets_alpha_and_what_is_added(isa):
    x, weight = matrices(5)
    x[1, 3] = INF
    added = torch.zeros(5, 70)
    added[1, 4] = -INF * weight[4, 3].sign() * -1
    args = (added, x, weight.t(), 2, -1)
    torch.testing.assert_close(
        run_kernel(Int8Matmul(True, isa).kernels()["aten::addmm"], *args)[1],
        torch.addmm(*args[:3], beta=2, alpha=-1)[1],
        equal_nan=True,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_in_the_bias_stays_one_whatever_its_bits(isa, dtype, subtests):
    for bits in [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001]:
        with subtests.test(bits=bits):
            x, weight = matrices(3)
            bias = torch.zeros(70)
            bias[5] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32) if bits > 0 else NAN
            result = run_kernel(linear(True, isa), x, weight, bias, dtype=dtype)
            assert result.isnan().sum().item() == result[:, 5].isnan().sum().item() == 3


def test_a_prepacked_weight_serves_every_set_of_instructions(isa):
    x, weight, factors = torch.randn(5, 130).bfloat16(), torch.randn(70, 130), torch.rand(130) * 50 + 1
    for given in ((), (factors,)):
        packed, own = (linear(True, each).prepack(weight, *given) for each in (0, isa))
        assert all(map(torch.equal, packed, own))
    assert torch.equal(Int8(isa).linear(x, weight, factors=given), Int8(0).linear(x, weight, factors=given))


def test_a_prepacked_weight_takes_a_byte_for_each_element():
    values, *others = linear(True).prepack(torch.randn(128, 192))
    assert values.nbytes == 128 * 192
    assert sum(other.nbytes for other in others) == 8 * 128


@pytest.mark.parametrize(
    "factors", [torch.ones(7), torch.ones(8, dtype=torch.float64), torch.ones(1, 8)], ids=["size", "dtype", "matrix"]
)
def test_wrong_factors_are_refused(factors):
    kernel = linear(True)
    with pytest.raises(RuntimeError, match="expected a float32 factor for each of 8 terms, got"):
        kernel.prepack(torch.randn(4, 8), factors)


def test_an_operator_refuses_another_number_of_factors():
    kernel = linear(True)
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    *packed, _ = kernel.prepack(weight)
    with pytest.raises(RuntimeError, match="the activations have 8 terms, and there are 7 factors"):
        kernel.operator(x, weight, None, *packed, torch.ones(7), torch.bfloat16, *kernel.constants)


@pytest.mark.parametrize("op", ["linear", "matmul", "mm"])
def test_an_operator_rejects_activations_that_do_not_fit(op):
    kernel, weight = Int8Matmul(True).kernels()[f"aten::{op}"], torch.randn(70, 130)
    args = (weight, None) if op == "linear" else (weight.t(),)
    others = (*args, *kernel.prepack(args[0]), torch.bfloat16, *kernel.constants)
    with pytest.raises(RuntimeError, match="the activations have 7 terms, the weight another number"):
        kernel.operator(torch.randn(5, 7), *others)
    with pytest.raises(RuntimeError, match="expected activations with at least one dimension"):
        kernel.operator(torch.tensor(1.0), *others)


def test_a_prepacked_weight_can_be_made_and_used_in_every_mode_of_autograd():
    x, weight = matrices(5)
    kernel = linear(True)
    with torch.inference_mode():
        prepared = kernel.prepack(weight)
    expected = kernel.run(prepared, x, weight, None)
    with torch.no_grad():
        assert torch.equal(kernel.run(kernel.prepack(weight), x, weight, None), expected)
    with torch.inference_mode():
        assert torch.equal(kernel.run(prepared, x, weight, None), expected)


def test_the_default_set_is_the_best_that_torchs_own_kernels_may_use():
    isas = torch.ops.polycast_cpu.isas()
    capability = torch.backends.cpu.get_cpu_capability()
    widest = {"DEFAULT": 0, "AVX2": 2}.get(capability, 4)
    assert torch.ops.polycast_cpu.best_isa() == max(isa for isa in isas if isa <= widest)


COUNT = """
import os, torch, polycast
torch.set_num_threads(3)
kernel = polycast.plugin.recipe_kernels(polycast.plugin.get_backend("cpu"), polycast.Int8())["aten::linear"][0].kernel
x, weight = torch.randn(512, 1024), torch.randn(1024, 1024)
torch.mm(x, weight), torch.relu(torch.randn(10**6))
before = len(os.listdir("/proc/self/task"))
kernel.run(kernel.prepack(weight), x, weight, None)
print(before > 1, len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lists the threads of a process")
def test_the_threads_are_torchs_own(launch):
    done = launch(COUNT)
    assert (done.stdout, done.stderr) == ("True 0\n", "")
