"""The kernels of accelerators that are absent: their tables, limits, shapes and dtypes."""

import itertools

import pytest
import torch

import polycast
import polycast_backends.cuda.out_dtype_kernels
import polycast_backends.xpu.out_dtype_kernels

ATEN = torch.ops.aten
MM, BMM, ADDMM, LINEAR = ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.linear.default


def int8(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def same(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual, expected)


ACCELERATORS = {"cuda": polycast_backends.cuda.out_dtype_kernels, "xpu": polycast_backends.xpu.out_dtype_kernels}
FLOAT32 = (MM, BMM, ADDMM, ATEN.baddbmm.default)
NEEDS = {MM: ATEN.mm.dtype, ADDMM: ATEN.mm.dtype, BMM: ATEN.bmm.dtype, ATEN.baddbmm.default: ATEN.bmm.dtype}


def test_a_table_has_a_kernel_only_where_the_dispatcher_has_the_op(subtests):
    for device_type in [name for name, its in polycast.backends().items() if its.state != "missing"]:
        with subtests.test(device_type=device_type):
            key = torch._C._dispatch_key_for_device(device_type)
            for op, source, _ in polycast.plugin.get_backend(device_type).kernels:
                wanted = ATEN._int_mm.default if source is torch.int8 else NEEDS[op]
                assert torch._C._dispatch_has_kernel_for_dispatch_key(wanted.name(), key)


@pytest.mark.parametrize("kernels", ACCELERATORS.values(), ids=ACCELERATORS)
def test_the_table_of_an_accelerator_is_what_its_torch_has(kernels, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    floats = {(op, dtype, torch.float32) for op in FLOAT32 for dtype in (torch.bfloat16, torch.float16)}
    int_mm = {(MM, torch.int8, torch.int32): kernels.mm_int8}
    assert set(kernels.kernel_table(lambda op: True)) == {*int_mm, *floats}
    assert kernels.kernel_table(lambda op: op is ATEN._int_mm.default) == int_mm
    assert set(kernels.kernel_table(lambda op: op is ATEN.bmm.dtype)) == {
        key for key in floats if NEEDS[key[0]] is ATEN.bmm.dtype
    }
    assert kernels.kernel_table(lambda op: False) == {}
    monkeypatch.setattr(kernels, "_int_mm", None)  # in a torch without it
    assert set(kernels.kernel_table(lambda op: True)) == floats


def test_rocm_has_only_the_int8_kernel(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    table = polycast_backends.cuda.out_dtype_kernels.kernel_table(lambda op: True)
    assert list(table) == [(MM, torch.int8, torch.int32)]


@pytest.mark.parametrize("kernels", ACCELERATORS.values(), ids=ACCELERATORS)
def test_int8_of_an_accelerator_is_exact_around_the_limits_of_its_kernel(kernels, monkeypatch):
    # torch's own for the CPU saturates sums of two products to 16 bits where the processor lacks VNNI.
    monkeypatch.setattr(kernels, "_int_mm", lambda a, b: torch.mm(a.int(), b.int()))
    for rows, terms, columns in itertools.product((0, 1, 16, 17, 24, 33), (0, 1, 7, 8, 16), (0, 1, 8, 9)):
        a, b = int8(terms, rows).t(), int8(columns, terms).t()
        same(kernels.mm_int8(a, b), torch.mm(a.int(), b.int()))


def test_cudas_int8_kernel_is_called_within_its_limits(fake, monkeypatch):
    seen = []

    def note(a, b):
        seen.append((tuple(a.shape), tuple(b.shape), [a.is_contiguous(), b.is_contiguous()]))
        return torch._int_mm(a, b)

    monkeypatch.setattr(polycast_backends.cuda.out_dtype_kernels, "_int_mm", note)
    for rows, terms, columns in [(1, 1, 1), (16, 8, 8), (17, 8, 8), (24, 16, 8), (100, 50, 30)]:
        a = torch.ones(terms, rows, dtype=torch.int8, device="cuda").t()
        b = torch.ones(columns, terms, dtype=torch.int8, device="cuda").t()
        result = polycast_backends.cuda.out_dtype_kernels.mm_int8(a, b)
        assert (result.shape, result.dtype, result.device) == ((rows, columns), torch.int32, a.device)
        assert result.is_contiguous()
    assert seen == [
        ((24, 8), (8, 8), [True, True]),
        ((24, 8), (8, 8), [True, True]),
        ((24, 8), (8, 8), [True, True]),
        ((24, 16), (16, 8), [True, True]),
        ((104, 56), (56, 32), [True, True]),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device_type", ACCELERATORS)
def test_float32_of_an_accelerator_has_the_shape_and_dtype_of_the_op(fake, device_type, dtype):
    def tensor(*shape):
        return torch.ones(shape, dtype=dtype, device=device_type)

    table = ACCELERATORS[device_type].kernel_table(lambda op: True)
    arguments = {
        MM: [(tensor(3, 4), tensor(4, 5)), (tensor(0, 4), tensor(4, 5))],
        BMM: [(tensor(2, 3, 4), tensor(2, 4, 5))],
        ADDMM: [(tensor(*bias), tensor(3, 4), tensor(4, 5)) for bias in [(5,), (3, 1), (3, 5), ()]],
        ATEN.baddbmm.default: [(tensor(*bias), tensor(2, 3, 4), tensor(2, 4, 5)) for bias in [(5,), (2, 3, 5)]],
    }
    for op, cases in arguments.items():
        for args in cases:
            result = table[op, dtype, torch.float32](*args)
            expected = op(*args)
            assert (result.dtype, result.shape, result.device) == (torch.float32, expected.shape, expected.device)


@pytest.mark.parametrize("kernels", ACCELERATORS.values(), ids=ACCELERATORS)
def test_an_accelerator_leaves_to_torch_what_its_kernels_do_not_take(kernels):
    assert kernels.mm_int8(int8(2, 2), int8(2, 2).int()) is NotImplemented
    assert kernels.mm_int8(int8(2, 3), int8(2, 2)) is NotImplemented


def test_a_product_in_float32_leaves_to_torch_what_it_does_not_take():
    half, single = torch.ones(2, 2).half(), torch.ones(2, 2)
    table = {op: kernel for (op, _, _), kernel in polycast.plugin.Backend.float32_products(lambda op: True).items()}
    mm, bmm, addmm, baddbmm = (table[op] for op in FLOAT32)
    refused = [mm(half, single), mm(half, half[0]), mm(half, half[:1]), bmm(half[None], half)]
    refused += [bmm(half[None], half[None].expand(2, 2, 2)), bmm(half[None], half[None, :1])]
    refused += [addmm(half, single, single), addmm(half[0], half, half[0])]
    refused += [baddbmm(half, single[None], single[None]), baddbmm(half[0], half, half)]
    assert refused == [NotImplemented] * 10
