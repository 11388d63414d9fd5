"""grad_scaler: enabled where the dtype needs it; training in float16 with it; its ops in Python."""

import math
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

import polycast
from polycast_plugins.observe.scaler_ops import check_and_unscale, update_scale, with_scaler_ops


def test_it_is_enabled_where_the_dtype_has_fewer_exponents_than_float32(subtests):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, None):
        with subtests.test(dtype=dtype):
            needed = dtype is torch.float16
            assert polycast.grad_scaler("cpu", dtype).is_enabled() is needed
            assert polycast.grad_scaler("cpu", dtype, enabled=True).is_enabled() is needed
            assert not polycast.grad_scaler("cpu", dtype, enabled=False).is_enabled()


def test_without_a_dtype_it_takes_the_one_that_a_region_would(hand_made, in_thread):
    hand_made("maia")
    assert polycast.grad_scaler("maia").is_enabled()

    def after_another_was_set():
        polycast.set_autocast_dtype("cpu", torch.float16)
        return polycast.grad_scaler("cpu").is_enabled()

    assert in_thread(after_another_was_set) is True


def test_it_is_a_scaler_of_torchs_with_its_options():
    scaler = polycast.grad_scaler("cpu:0", torch.float16, init_scale=8.0, growth_interval=3)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 3)
    assert scaler._device == "cpu"


def test_where_the_region_would_run_disabled_it_is_disabled_and_says_so_if_it_would_scale(hand_made):
    hand_made("maia", availability=lambda: polycast.plugin.Availability(False, "it is not plugged in"))
    said = r"^A region of torch\.float16 on maia runs disabled: it is not plugged in\.$"
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match=said) as record:
        scaler = polycast.grad_scaler("maia")
    assert not scaler.is_enabled()
    assert [each.filename for each in record] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not polycast.grad_scaler("maia", torch.bfloat16).is_enabled()


BAD = [
    ((0,), {}, ValueError, "^Expected `device_type` of type `str`, got: `<class 'int'>`"),
    (("not a real device",), {}, RuntimeError, "^Invalid device string: 'not a real device'"),
    (("cpu", "float16"), {}, TypeError, "^dtype must be a torch.dtype or None, got 'float16'"),
    (("cpu", torch.int8), {}, ValueError, "^the fast dtype must be floating point, got torch.int8"),
    (("cpu",), {"enabled": 1}, TypeError, "^enabled must be a bool, got 1"),
    (("cpu", torch.float16), {"model": "layers"}, TypeError, "^model must be a torch.nn.Module or None, got 'layers'$"),
    (("cpu",), {"growth": 2}, TypeError, "growth"),
    (("hpu",), {}, polycast.errors.BackendNotFoundError, "'hpu'"),
]


def test_bad_arguments_are_refused(subtests):
    for arguments, options, kind, text in BAD:
        with subtests.test(arguments=arguments, options=options), pytest.raises(kind, match=text):
            polycast.grad_scaler(*arguments, **options)


@pytest.mark.usefixtures("engine")
def test_training_in_float16_skips_the_step_that_overflows_and_learns():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = polycast.grad_scaler("cpu", torch.float16, init_scale=2.0**24)
    inputs = torch.randn(64, 4)
    losses, scales, weights = [], [], [model[0].weight.detach().clone()]
    for _ in range(60):
        with polycast.autocast("cpu", torch.float16):
            out = model(inputs)
        assert out.dtype is torch.float16
        loss = torch.nn.functional.mse_loss(out.float(), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        weights.append(model[0].weight.detach().clone())
    assert torch.equal(weights[0], weights[1]), "the first scale is too large for float16, so the step is skipped"
    assert scales[0] == 2.0**23
    assert not torch.equal(weights[-2], weights[-1])
    assert losses[-1] < losses[0] / 5


@pytest.mark.usefixtures("engine")
def test_a_gradient_that_float16_cannot_hold_is_lost_without_the_scaler_and_kept_with_it():
    def gradient(scaler):
        weight = torch.nn.Parameter(torch.ones(1, 1))
        with polycast.autocast("cpu", torch.float16):
            out = torch.ones(1, 1) @ weight
        scaler.scale(out.float().sum() * 1e-8).backward()
        return weight.grad.item() / scaler.get_scale()

    assert gradient(polycast.grad_scaler("cpu", torch.bfloat16)) == 0
    assert gradient(polycast.grad_scaler("cpu", torch.float16)) == pytest.approx(1e-8, rel=1e-2)


# ---- The two ops of a scaler in Python, for devices without kernels of them


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_are_unscaled_and_checked_as_by_torch(dtype, subtests):
    for values in ([1.0, -3.0], [1.0, math.inf], [-math.inf], [math.nan, 2.0], [6e4], []):
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
