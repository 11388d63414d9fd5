"""grad_scaler: enabled where the dtype needs it; training in float16 with it."""

import warnings

import pytest
import torch

import polycast


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


def test_where_the_region_would_run_disabled_it_is_disabled_and_says_so(hand_made):
    hand_made("maia", availability=lambda: polycast.plugin.Availability(False, "it is not plugged in"))
    said = r"^A region of torch\.float16 on maia runs disabled: it is not plugged in\.$"
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match=said) as record:
        scaler = polycast.grad_scaler("maia")
    assert not scaler.is_enabled()
    assert record[0].filename == __file__


def test_nothing_is_said_where_nothing_is_scaled(hand_made):
    hand_made("maia", availability=lambda: polycast.plugin.Availability(False, "it is not plugged in"))
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
    targets = inputs.sum(1, keepdim=True)
    losses, scales, unchanged = [], [], []
    for _ in range(60):
        before = model[0].weight.detach().clone()
        with polycast.autocast("cpu", torch.float16):
            out = model(inputs)
        assert out.dtype is torch.float16
        loss = torch.nn.functional.mse_loss(out.float(), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        unchanged.append(torch.equal(before, model[0].weight))
    assert unchanged[0], "the first scale is too large for float16, so the step is skipped"
    assert scales[0] == 2.0**23
    assert not unchanged[-1]
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
