"""The CPU's int8 kernels: within the error of their recipe, for every op, dtype, size, layout and instruction set."""

import itertools
import subprocess
import sys

import pytest
import torch

import polycast
from polycast_plugins.quantize.cpu.int8 import Int8Matmul
from polycast_plugins.testing.low_bit import assert_within

from .low_bit_calls import int8_product, run_kernel

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def kernel_of(op):
    """Return a function that makes a product and returns its kernel of an op."""
    return lambda *how: Int8Matmul(*how).kernels()[f"aten::{op}"]


linear, matmul, mm, addmm = map(kernel_of, ("linear", "matmul", "mm", "addmm"))


def check(kernel, x, weight, *rest, by_row=True, bias=0.0, dtype=torch.float32, args=None):
    """Check a product by a weight [N, K] against float64's."""
    actual = run_kernel(kernel, *(args or (x, weight, *rest)), dtype=dtype)
    expected, error = int8_product(x, weight, by_row)
    assert_within(actual, expected + bias, error)


def test_linear_takes_each_dtype_and_gives_each(isa, by_row, subtests):
    for given, wanted in list(itertools.product(FLOATS, FLOATS)):
        with subtests.test(given=given, wanted=wanted):
            x, weight, bias = torch.randn(5, 130).to(given), torch.randn(70, 130).to(given), torch.randn(70).to(given)
            check(linear(by_row, isa), x, weight, bias, bias=bias.double(), dtype=wanted, by_row=by_row)


def test_each_number_of_rows_is_right(isa, by_row, subtests):
    for rows in [1, 2, 3, 4, 5, 6, 7, 13, 15, 16, 17, 31, 32, 33, 257]:
        with subtests.test(rows=rows):
            check(linear(by_row, isa), torch.randn(rows, 192), torch.randn(128, 192), None, by_row=by_row)


def test_sizes_need_be_no_multiple_of_anything(isa, subtests):
    for columns, terms in itertools.product([1, 15, 63, 64, 65, 200], [1, 2, 3, 5, 63, 64, 67, 200]):
        with subtests.test(columns=columns, terms=terms):
            for rows in (1, 3, 20, 40):
                x, weight, bias = torch.randn(rows, terms), torch.randn(columns, terms), torch.randn(columns)
                check(linear(True, isa), x, weight, bias, bias=bias.double())


def test_the_longest_sums_do_not_overflow(isa):
    x, weight = torch.ones(2, 65536), torch.full((2, 65536), -1.0)
    weight[1] = 1
    result = run_kernel(linear(True, isa), x, weight, None)
    assert torch.equal(result, torch.tensor([[-65536.0, 65536.0]]).expand(2, 2))


def test_activations_have_any_number_of_dimensions(by_row, subtests):
    for shape in [(130,), (1, 130), (2, 3, 130), (2, 1, 3, 130)]:
        with subtests.test(shape=shape):
            x, weight = torch.randn(shape), torch.randn(70, 130)
            check(linear(by_row), x, weight, None, by_row=by_row)
            check(matmul(by_row), x, weight, args=(x, weight.t()), by_row=by_row)


@pytest.mark.parametrize("shape", [(0, 130), (2, 0, 130)], ids=str)
def test_an_empty_batch_gives_an_empty_result(by_row, shape):
    assert run_kernel(linear(by_row), torch.randn(shape), torch.randn(70, 130), None).shape == (*shape[:-1], 70)


LAYOUTS = {
    "transposed": lambda rows, columns: torch.randn(columns, rows).t(),
    "expanded": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
    "one number": lambda rows, columns: torch.randn(1, 1).expand(rows, columns),
    "overlapping": lambda rows, columns: torch.randn(rows + columns).as_strided((rows, columns), (1, 1)),
    "overlapping rows": lambda rows, columns: torch.randn(3 * rows + columns).as_strided((rows, columns), (3, 1)),
    "steps": lambda rows, columns: torch.randn(2 * rows, 3 * columns)[::2, ::3],
    "slice": lambda rows, columns: torch.randn(rows, columns + 3)[:, 1 : columns + 1],
}


def test_each_layout_is_right(subtests):
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        with subtests.test(left=left, right=right):
            x, weight = LAYOUTS[left](20, 130), LAYOUTS[right](70, 130)
            check(linear(True), x, weight, None)
            check(mm(True), x, weight, args=(x, weight.t()))


def test_a_batch_that_no_matrix_is_a_view_of_is_right():
    x = torch.randn(3, 4, 130).transpose(0, 1)
    check(linear(True), x, torch.randn(70, 130), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_bias_may_have_another_dtype(dtype):
    x, weight, bias = torch.randn(5, 130).half(), torch.randn(70, 130).bfloat16(), torch.randn(70).to(dtype)
    check(linear(True), x, weight, bias, bias=bias.double())


BIASES = {
    "vector": lambda: torch.randn(70),
    "row": lambda: torch.randn(1, 70),
    "column": lambda: torch.randn(5, 1),
    "matrix": lambda: torch.randn(5, 70),
    "transposed matrix": lambda: torch.randn(70, 5).t(),
    "one": lambda: torch.randn(1),
    "number": lambda: torch.tensor(0.5),
    "bfloat16": lambda: torch.randn(70).bfloat16(),
}


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (2, -0.5), (0.25, 3)])
def test_addmm_scales_what_it_adds_and_what_it_adds_to(isa, by_row, beta, alpha, subtests):
    for bias in BIASES:
        with subtests.test(bias=bias):
            added, x, weight = BIASES[bias](), torch.randn(5, 130), torch.randn(70, 130)
            actual = run_kernel(addmm(by_row, isa), added, x, weight.t(), beta, alpha)
            expected, error = int8_product(x, weight, by_row)
            assert_within(actual, alpha * expected + beta * added.double(), abs(alpha) * error + 1e-6)


def test_addmm_with_a_beta_of_zero_does_not_look_at_what_it_adds():
    x, weight = torch.randn(5, 130), torch.randn(70, 130)
    check(addmm(True), x, weight, args=(torch.full((70,), torch.nan), x, weight.t(), 0, 1))


def test_mm_addmm_and_matmul_share_what_a_weight_is_packed_into():
    assert mm(True).prepack_key == addmm(True).prepack_key == matmul(True).prepack_key != linear(True).prepack_key


def test_a_prepacked_weight_serves_every_set_of_instructions(isa):
    weight = torch.randn(70, 130)
    for packed, own in zip(linear(True, 0).prepack(weight), linear(True, isa).prepack(weight), strict=True):
        assert torch.equal(packed, own)


def test_a_prepacked_weight_takes_a_byte_for_each_element():
    values, *others = linear(True).prepack(torch.randn(128, 192))
    assert values.nbytes == 128 * 192
    assert sum(other.nbytes for other in others) == 8 * 128


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_makes_no_difference(isa, threads):
    x, weight = torch.randn(300, 1000), torch.randn(500, 1000)
    kernel, before = linear(False, isa), torch.get_num_threads()
    expected = run_kernel(kernel, x, weight, None)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(run_kernel(kernel, x, weight, None), expected)
    finally:
        torch.set_num_threads(before)


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
def test_the_threads_are_torchs_own():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True 0\n", "")
