"""Activations that the recipe "fastest" converts: bit for bit as torch, in any layout, of any size, on any threads."""

import pytest
import torch
import torch.nn.functional as F

from polycast import autocast

LAYOUTS = {
    "contiguous": lambda shape: torch.randn(shape),
    "channels last": lambda shape: torch.randn(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2),
    "transposed": lambda shape: torch.randn(shape[::-1]).permute(3, 2, 1, 0),
    "behind others": lambda shape: torch.randn(5 + shape.numel())[5:].view(shape),
    "with gaps": lambda shape: torch.randn(*shape[:-1], shape[-1] + 3)[..., :-3],
    "expanded": lambda shape: torch.randn(shape[1:]).expand(shape),
    "negated": lambda shape: torch.randn(shape, dtype=torch.complex64).conj().imag,
}
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (0, 3, 4, 4), (4, 8, 33, 31), (2, 16, 64, 64), (2, 1, 200, 90)]
"""The last three have more than 32,768 numbers, which several threads convert."""


@pytest.fixture(params=[1, 2, 3])
def some_threads(request):
    torch.set_num_threads(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_activation_is_converted_as_by_torch(layout, shape, dtype, some_threads, float32_way, engine):
    x = LAYOUTS[layout](torch.Size(shape)).to(dtype)
    assert x.shape == shape
    other = torch.randn(shape)
    weight = torch.randn(4, shape[1], 1, 1, requires_grad=False)
    with torch.no_grad():
        expected = F.scaled_dot_product_attention(x.float(), other, other), F.conv2d(x.float(), weight)
        for _ in range(2):  # by Python, and natively
            with autocast("cpu", recipe=float32_way):
                found = F.scaled_dot_product_attention(x, other, other), F.conv2d(x, weight)
            for one, of_torch in zip(found, expected, strict=True):
                assert one.dtype is torch.bfloat16
                assert one.stride() == of_torch.bfloat16().stride()
                assert torch.equal(one, of_torch.bfloat16())


@pytest.mark.parametrize("count", [1, 7, 32767, 32769, 100_003])
def test_results_of_any_value_are_rounded_as_by_torch(count, some_threads, float32_way, engine):
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(count))
    special = torch.tensor(
        [float("inf"), float("-inf"), float("nan"), 1e30, -1e-40, 0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]
    )
    values = torch.cat([special, bits.view(torch.float32)])[:count, None, None]
    ones = torch.ones(count, 1, 1)
    with torch.no_grad():
        expected = torch.bmm(values, ones).bfloat16()
        for _ in range(2):
            with autocast("cpu", recipe=float32_way):
                found = torch.bmm(values, ones)
            assert found.dtype is torch.bfloat16
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
