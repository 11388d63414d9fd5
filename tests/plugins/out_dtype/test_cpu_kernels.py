"""The CPU's int8 kernels: exact for every layout, size and instruction set."""

import itertools
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polycast_backends.cpu.out_dtype_kernels
from polycast import out_dtype

from .int8_matrices import ADDMM, BMM, LINEAR, MM, int8, same, same_as_torchs

LAYOUTS = {
    "rows": lambda rows, columns: int8(rows, columns),
    "columns": lambda rows, columns: int8(columns, rows).t(),
    "rows of a slice": lambda rows, columns: int8(rows, columns + 3)[:, 1 : columns + 1],
    "columns of a slice": lambda rows, columns: int8(columns, rows + 3)[:, 1 : rows + 1].t(),
    "steps": lambda rows, columns: int8(2 * rows, 3 * columns)[::2, ::3],
    "one row": lambda rows, columns: int8(1, columns).expand(rows, columns),
    "one column": lambda rows, columns: int8(rows, 1).expand(rows, columns),
    "one number": lambda rows, columns: int8(1, 1).expand(rows, columns),
    "overlapping": lambda rows, columns: int8(rows + columns + 1).as_strided((rows, columns), (1, 1)),
    "largest": lambda rows, columns: torch.full((rows, columns), 127, dtype=torch.int8),
    "smallest": lambda rows, columns: torch.full((rows, columns), -128, dtype=torch.int8),
}
SIZES = (0, 1, 2, 3, 8, 17, 33)


@pytest.mark.slow
@pytest.mark.parametrize("left", LAYOUTS)
def test_mm_of_int8_is_exact_for_every_layout_and_size(cpu, left):
    wrong = []
    for right, rows, terms, columns in itertools.product(LAYOUTS, SIZES, SIZES, SIZES):
        a, b = LAYOUTS[left](rows, terms), LAYOUTS[right](terms, columns)
        result = out_dtype(MM, torch.int32, a, b)
        if result.dtype is not torch.int32 or not torch.equal(result, torch.mm(a.int(), b.int())):
            wrong.append((right, rows, terms, columns))
    assert wrong == []


def test_a_torch_without_its_int8_product_has_none(monkeypatch):
    monkeypatch.setattr(polycast_backends.cpu.out_dtype_kernels, "_int_mm", None)
    assert polycast_backends.cpu.out_dtype_kernels._multiplies_int8.__wrapped__() is False


@pytest.mark.parametrize("terms", [1024, 1025, 1041, 2**17 + 5])
def test_long_sums_are_exact_and_wrap_as_torchs_do(cpu, terms, subtests):
    for one, other in [(-128, -128), (-128, 127), (127, 127)]:
        with subtests.test(one=one, other=other):
            a, b = torch.full((2, terms), one, dtype=torch.int8), torch.full((terms, 3), other, dtype=torch.int8)
            same_as_torchs(MM, torch.int32, a, b)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    terms=st.integers(0, 40),
    columns=st.integers(0, 40),
    dtype=st.sampled_from([None, torch.int8, torch.int32]),
)
def test_linear_of_int8_is_torchs_bit_for_bit(shape, terms, columns, dtype):
    bias = () if dtype is None else (torch.randint(-100, 100, (columns,), dtype=dtype),)
    same_as_torchs(LINEAR, torch.int32, int8(*shape, terms), int8(columns, terms), *bias)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_addmm_of_int8_is_exact(cpu, dtype, subtests):
    for bias in [(5, 7), (7,), (1, 7), (5, 1), ()]:
        with subtests.test(bias=bias):
            bias, a, b = torch.randint(-100, 100, bias, dtype=dtype), int8(5, 33), int8(33, 7)
            same(out_dtype(ADDMM, torch.int32, bias, a, b), torch.addmm(bias.int(), a.int(), b.int()))


def test_bmm_of_int8_is_exact(cpu, subtests):
    sizes = [(3, 5, 7, 2), (0, 1, 1, 1), (2, 0, 3, 4), (2, 3, 0, 4), (2, 64, 64, 64), (1, 2, 1030, 3)]
    for count, rows, terms, columns in sizes:
        with subtests.test(count=count, rows=rows, terms=terms, columns=columns):
            a, b = int8(count, terms, rows).mT, int8(count, terms, columns)
            same(out_dtype(BMM, torch.int32, a, b), torch.bmm(a.int(), b.int()))


def test_only_the_bias_may_be_in_another_dtype():
    bias, a, b = int8(3), int8(3, 3).int(), int8(3, 3).int()
    same_as_torchs(LINEAR, torch.int32, a, b, bias)
    same(out_dtype(ADDMM, torch.int32, bias, a, b), torch.addmm(bias.int(), a, b))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "AVX512_CORE", "ALL"])
def test_int8_is_exact_whatever_instructions_onednn_may_use(launch, isa):
    script = (
        "import torch, polycast\n"
        "a = torch.full((16, 16), 127, dtype=torch.int8)\n"
        "print(polycast.out_dtype(torch.ops.aten.mm.default, torch.int32, a, a).unique().tolist())"
    )
    done = launch(script, environment={**os.environ, "ONEDNN_MAX_CPU_ISA": isa})
    assert (done.stdout, done.stderr) == (f"[{16 * 127 * 127}]\n", "")
