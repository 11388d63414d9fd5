"""The kernel that multiplies int8 matrices into an int32 one, and what scales gradients."""

import pytest
import torch

import polycast
from polycast_npy.kernels import int8_mm

MM = torch.ops.aten.mm.default


@pytest.fixture
def products(monkeypatch):
    """Return the list of products that the kernel has made."""
    made = []

    def kernel(*args):
        made.append(int8_mm(*args))
        return made[-1]

    monkeypatch.setattr(polycast.plugin.get_backend("npy"), "kernels", {(MM, torch.int8, torch.int32): kernel})
    return made


def test_the_backend_supplies_the_kernel():
    assert polycast.plugin.get_backend("npy").kernels == {(MM, torch.int8, torch.int32): int8_mm}


def test_out_dtype_runs_the_kernel_and_the_product_is_exact(products):
    a = torch.randint(-128, 128, (7, 300), dtype=torch.int8)
    b = torch.randint(-128, 128, (300, 5), dtype=torch.int8)
    actual = polycast.out_dtype(MM, torch.int32, a.to("npy"), b.to("npy"))
    assert actual is products[0]
    assert (actual.device.type, actual.dtype) == ("npy", torch.int32)
    assert torch.equal(actual.cpu(), a.to(torch.int32) @ b.to(torch.int32))


def test_a_product_wraps_where_it_leaves_int32():
    a = torch.full((1, 140_000), -128, dtype=torch.int8, device="npy")
    assert polycast.out_dtype(MM, torch.int32, a, a.t()).item() == 140_000 * 128 * 128 - 2**32


def test_what_the_kernel_does_not_take_is_left_to_torch(products):
    a, b = torch.ones(2, 3, dtype=torch.int8, device="npy"), torch.ones(3, 2, dtype=torch.int32, device="npy")
    assert polycast.out_dtype(MM, torch.int32, a, b).tolist() == [[3, 3], [3, 3]]
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        polycast.out_dtype(MM, torch.int32, a, a)
    assert products == [NotImplemented, NotImplemented]


def test_a_scaler_skips_a_step_that_is_not_finite():
    weight = torch.nn.Parameter(torch.ones(2, device="npy"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("npy", init_scale=4.0, growth_interval=1)
    for factor, expected, scale in [(1.0, 0.0, 8.0), (float("inf"), 0.0, 4.0), (1.0, -1.0, 8.0)]:
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [expected] * 2
        assert scaler.get_scale() == scale
