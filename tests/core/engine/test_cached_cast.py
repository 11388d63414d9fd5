"""The operator ``polycast::cached_cast``; tests/core/compilers/test_cached_casts.py tests it in compiled code."""

import pytest
import torch

import polycast
from polycast.engine.kernels import autocast_key


@pytest.mark.usefixtures("engine")
def test_each_device_has_a_kernel_at_its_key_and_at_its_autograd_key(subtests):
    """No tensor with a gradient can be made on an absent device, so the dispatch table is read."""
    for device in ["cpu", "cuda", "maia", "mps", "mtia", "xpu"]:
        with subtests.test(device=device):
            polycast.uninstall()
            polycast.install(device)
            table = torch._C._dispatch_dump_table("polycast::cached_cast").splitlines()
            called = dict(line.split(": ", maxsplit=1) for line in table)
            key = autocast_key(device).removeprefix("Autocast")
            assert called[key].endswith("[kernel]")
            assert called["Autograd" + key].endswith(("[kernel]", "[autograd kernel]"))


def test_it_has_the_history_of_a_cast_without_installed_kernels():
    weight = torch.ones(2, 2, requires_grad=True)
    cast = torch.ops.polycast.cached_cast(weight, torch.bfloat16)
    assert cast.dtype is torch.bfloat16
    cast.sum().backward()
    assert torch.equal(weight.grad, torch.ones(2, 2))
