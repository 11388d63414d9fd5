"""The two ops of a gradient scaler in Python, for devices without kernels of them: the same as torch's."""

import os
import sys
from pathlib import Path

import pytest
import torch

from polycast_plugins.observe.scaler_ops import check_and_unscale, update_scale, with_scaler_ops

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_are_unscaled_and_checked_as_by_torch(dtype, subtests):
    for values in ([1.0, -3.0], [1.0, INF], [-INF], [NAN, 2.0], [6e4], []):
        with subtests.test(values=values):
            results = []
            for function in (torch._amp_foreach_non_finite_check_and_unscale_, check_and_unscale):
                grads = [torch.tensor(values, dtype=dtype), torch.ones(2, 2, dtype=dtype)]
                found = torch.zeros(())
                function(grads, found, torch.tensor(1 / 3))
                results.append([*grads, found])
            torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("found", [0.0, 1.0, 2.0])
def test_the_scale_is_updated_as_by_torch(found, subtests):
    for scale in (8.0, 2.0**127, 1e-45):
        for tracker in (0, 1, 2):
            with subtests.test(scale=scale, tracker=tracker):
                results = []
                for function in (torch._amp_update_scale_, update_scale):
                    arguments = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(found)
                    assert function(*arguments, 4.0, 0.25, 2) is arguments[0]
                    results.append(arguments)
                assert results[0] == results[1]


def test_a_device_with_kernels_uses_them():
    with with_scaler_ops("cpu"):
        assert torch._C._len_torch_function_stack() == 0


SCRIPT = """
import sys, torch, polycast, polycast_npy
from polycast_npy.ops import scaling
scaling.KERNELS.clear()
polycast_npy.register_device()
layer = torch.nn.Linear(4, 1).to("npy")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
scaler = polycast.grad_scaler("npy", init_scale=2.0**15, growth_interval=1)
scales = []
for factor in (1.0, 1e38, 1.0):
    loss = layer(torch.ones(2, 4, device="npy")).sum() * factor
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale() / 2**15)
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_amp_update_scale_", "PrivateUse1")
skipped = [each.step for each in scaler.history.skipped]
print(has_kernel, scales, skipped, layer.weight.isfinite().all().item())
"""


@pytest.mark.slow
def test_it_scales_on_a_device_without_the_ops_and_without_a_plugin(launch):
    pytest.importorskip("numpy", reason="the device computes with NumPy")
    path = os.pathsep.join([str(Path(__file__).parents[3] / "examples/polycast-npy/src"), *sys.path])
    done = launch(SCRIPT, environment={**os.environ, "PYTHONPATH": path})
    assert done.stdout == "False [2.0, 1.0, 2.0] [1] True\n", done.stderr
