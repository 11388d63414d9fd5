"""The casts of weights on the CPU, bit for bit those of torch's kernel for all values, sizes, strides and memory."""

import ctypes
import mmap
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import polycast

from .cached_casts import events

pytestmark = pytest.mark.usefixtures("engine")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def cast_of(define):
    """Return a function that gives a copy of what an op gets of a weight in a region."""
    define("copy(Tensor x) -> Tensor", kernel=torch.clone)

    def cast_of(weight, dtype=torch.bfloat16, **region):
        with torch.no_grad(), polycast.autocast("cpu", dtype, **region):
            return torch.ops.polycast_test.copy(weight)

    with polycast.register_op("polycast_test::copy", "lower_precision_fp"):
        yield cast_of


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


def any_bits(count):
    """Return numbers of all kinds: nan with any payload, inf, denormal ones, and what is half way between two casts."""
    words = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(count))
    kinds = torch.tensor([0, -(2**31), 0x7F800000, -0x800000, 0x7F800001, 1, 0x7FFFFF, 0x3F808000, 0x3F818000])
    words[: len(kinds)] = kinds[:count]
    return words.to(torch.int32).view(torch.float32)


def assert_as_torch_casts(cast, weight):
    expected = weight.detach().to(cast.dtype)
    assert cast.stride() == expected.stride()
    assert torch.equal(cast.view(torch.int16), expected.view(torch.int16))


@DTYPES
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 65, 200, 32768, 65537])
def test_values_of_all_kinds_in_any_number(cast_of, size, dtype, any_cache):
    weight = frozen(any_bits(size))
    assert_as_torch_casts(cast_of(weight, dtype, cache=any_cache), weight)


@DTYPES
def test_a_cast_on_several_threads(cast_of, dtype, threads):
    weight = frozen(any_bits(300_001))
    assert_as_torch_casts(cast_of(weight, dtype), weight)


def test_weights_with_any_strides(cast_of, subtests):
    for lay in [
        lambda x: x.t(),
        lambda x: x[1:, 3:],
        lambda x: x[5],
        lambda x: x[::2],
        lambda x: x.view(8, 16, 16).permute(2, 0, 1),
        lambda x: x.view(8, 4, 8, 8).to(memory_format=torch.channels_last),
        lambda x: x[0].expand(4, 32),
        lambda x: x.sum(),
        lambda x: x.view(-1)[1:2000],
        lambda x: x.as_strided((1, 64), (999, 1)),
        torch._lazy_clone,
    ]:
        with subtests.test(lay=lay):
            weight = frozen(lay(torch.randn(64, 32)))
            assert_as_torch_casts(cast_of(weight), weight)


def test_weights_at_any_address(cast_of, subtests):
    numbers = bytearray(any_bits(1001).view(torch.uint8).tolist())
    for offset in [1, 2, 3, 4]:
        with subtests.test(offset=offset):
            weight = frozen(torch.frombuffer(numbers, dtype=torch.float32, offset=offset, count=1000))
            assert_as_torch_casts(cast_of(weight), weight)


@DTYPES
def test_denormal_values_that_the_processor_flushes_to_zero(cast_of, dtype):
    weight = frozen(any_bits(1000).view(torch.int32).bitwise_and(0x7FFFFF).view(torch.float32))
    torch.set_flush_denormal(True)
    try:
        assert_as_torch_casts(cast_of(weight, dtype), weight)
    finally:
        torch.set_flush_denormal(False)


def test_a_weight_without_memory_raises_torchs_error(cast_of):
    weight = frozen(torch.randn(64, 64))
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        weight.detach().to(torch.bfloat16)
    with pytest.raises(RuntimeError):
        cast_of(weight)


def test_gradients_go_through_as_through_torchs_cast():
    weight, x = nn.Parameter(torch.randn(300, 200)), torch.randn(4, 200)

    def gradient(amp):
        with amp.autocast("cpu"):
            out = torch.nn.functional.linear(x, weight)
        return torch.autograd.grad(out.float().square().sum(), weight)[0]

    assert torch.equal(gradient(polycast), gradient(torch))


@pytest.mark.parametrize("engine", ["native"], indirect=True)
def test_torchs_kernel_is_not_called(cast_of):
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if not capabilities.get("avx2"):
        pytest.skip("the processor has no AVX2, for which the cast is written")
    weight = frozen(torch.randn(64, 64))
    found = events(lambda: cast_of(weight))
    assert "aten::copy_" in found
    assert "aten::_to_copy" not in found


@pytest.fixture
def upper_halves():
    """Return what writes, zeroes and asks for the upper halves of the vector registers: see XGETBV, ECX = 1.

    While these are in use, code that was compiled for SSE, as most of torch and Python is, waits for them.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() not in {"x86_64", "AMD64"} or not cpuinfo.exists() or "xgetbv1" not in cpuinfo.read_text():
        pytest.skip("the processor does not tell which of its registers are in use")
    codes = {"write": "c5fd76c0c3", "zero": "c5f877c3", "state": "b9010000000f01d0c3"}
    try:
        memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except PermissionError:
        pytest.skip("the system refuses memory that is written and executed")
    with memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        functions = {}
        for at, (name, code) in zip(range(0, 64, 16), codes.items(), strict=False):
            memory[at : at + len(code) // 2] = bytes.fromhex(code)
            functions[name] = ctypes.CFUNCTYPE(ctypes.c_uint32)(address + at)
        registers = SimpleNamespace(**functions, are_in_use=lambda: bool(functions["state"]() & 4))
        registers.write()
        written = registers.are_in_use()
        registers.zero()
        if not written or registers.are_in_use():
            pytest.skip("the processor tells no difference")
        yield registers


@DTYPES
def test_a_cast_does_not_slow_what_runs_after_it(upper_halves, dtype):
    weight = frozen(torch.randn(300))
    with polycast.autocast("cpu", cache=polycast.WeightCache()):
        upper_halves.zero()
        torch.ops.polycast.cached_cast(weight, dtype, 0)
        assert not upper_halves.are_in_use()
