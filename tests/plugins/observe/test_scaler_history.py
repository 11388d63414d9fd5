"""The history of grad_scaler: the scale, the skipped steps, and the gradients that were not finite."""

import copy
import gc
import json
import pickle
from types import SimpleNamespace

import pytest
import torch

import polycast
from polycast_plugins.observe import Origin, ScalerHistory, SkippedStep, grad_scaler
from polycast_plugins.observe.grad_scaler import MAX_SKIPPED, HistoryRecorder, listeners, recording


def layers():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def take(scaler, model, optimizer, *values):
    """Take a step for each value, which is that of one element of the gradient of the first layer's weight."""
    for value in values:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum() * 0.0).backward()
        model[0].weight.grad[0, 0] = value
        scaler.step(optimizer)
        scaler.update()


@pytest.fixture
def model():
    return layers()


@pytest.fixture(params=[False, True], ids=["loop", "fused"])
def optimizer(request, model):
    return torch.optim.SGD(model.parameters(), lr=0.1, fused=request.param)


@pytest.fixture
def scaler(model):
    return polycast.grad_scaler("cpu", torch.float16, init_scale=1024.0, growth_interval=2, model=model)


INF, NAN = float("inf"), float("nan")


def test_it_has_the_scale_of_each_step(scaler, model, optimizer):
    take(scaler, model, optimizer, 0.0, INF, 0.0, 0.0, 0.0)
    scaler.update(8.0)
    take(scaler, model, optimizer, 0.0)
    history = scaler.history
    assert history.scales == ((0, 1024.0), (2, 512.0), (4, 1024.0), (6, 8.0))
    scales = [1024.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0, 8.0, None]
    assert [history.scale_at(step) for step in range(8)] == scales


def test_it_has_the_skipped_steps_and_their_parameters(scaler, model, optimizer):
    take(scaler, model, optimizer, 0.0, INF, 0.0, NAN)
    assert scaler.history.skips == 2
    assert scaler.history.skipped == tuple(
        SkippedStep(step, scale, ("0.weight",), count=1, of=4) for step, scale in ((1, 1024.0), (3, 512.0))
    )


def test_gradients_that_were_unscaled_and_clipped_before_are_recorded_too(scaler, model, optimizer):
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    model[1].bias.grad[0] = NAN
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model[1].bias, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert [skip.parameters for skip in scaler.history.skipped] == [("1.bias",)]


def test_the_parameters_nearest_to_the_loss_are_first(scaler, model, optimizer):
    model(torch.full((1, 4), INF)).sum().backward()
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    (skip,) = scaler.history.skipped
    assert skip.parameters == ("1.weight", "0.weight")
    assert str(skip) == "step 0, scale 1024; gradients of 2 of 4 parameters: 1.weight, 0.weight"
    assert str(scaler.history) == f"1 steps, scale 1024, 1 skipped\n  {skip}"


@pytest.mark.parametrize(("named", "name"), [(True, "0.weight"), (False, "group 0, parameter 0 (4, 4)")])
def test_without_a_model_parameters_have_the_names_of_the_optimizer(named, name, model):
    scaler = polycast.grad_scaler("cpu", torch.float16)
    parameters = model.named_parameters() if named else model.parameters()
    take(scaler, model, torch.optim.SGD(parameters, lr=0.1), INF)
    assert [skip.parameters for skip in scaler.history.skipped] == [(name,)]


def test_a_step_with_two_optimizers_has_the_parameters_of_both(scaler, model):
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    model[0].weight.grad[0] = model[1].weight.grad[0] = INF
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.history.skipped == (SkippedStep(0, 1024.0, ("0.weight", "1.weight"), 2, 4),)


def test_a_sparse_gradient_is_examined(scaler):
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.named_parameters(), lr=0.1)
    scaler.scale(embedding(torch.tensor([1])).sum() * INF).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [skip.parameters for skip in scaler.history.skipped] == [("weight",)]


def test_training_is_bitwise_that_with_torchs_scaler():
    def weights(scaler):
        torch.manual_seed(0)
        model = layers()
        take(scaler, model, torch.optim.Adam(model.parameters(), lr=0.1), 1.0, INF, 2.0, 3.0)
        return list(model.parameters())

    ours = weights(polycast.grad_scaler("cpu", torch.float16))
    assert all(map(torch.equal, ours, weights(torch.amp.GradScaler("cpu"))))


def test_a_step_that_is_not_skipped_reads_no_gradient(scaler, model, optimizer, monkeypatch):
    def examine(*arguments):
        raise AssertionError

    monkeypatch.setattr(grad_scaler, "_nonfinite_gradients", examine)
    take(scaler, model, optimizer, 0.0, 0.0)
    assert scaler.history.steps == 2


def test_steps_of_a_fused_optimizer_on_a_device_are_read_together(scaler, model, monkeypatch):
    monkeypatch.setattr(grad_scaler, "_is_asynchronous", lambda tensor: True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    take(scaler, model, optimizer, 0.0, INF, 0.0)
    assert scaler._recorder.steps == 0
    assert scaler.history == ScalerHistory(3, ((0, 1024.0), (2, 512.0)), 1, (SkippedStep(1, 1024.0),))
    take(scaler, model, optimizer, *[0.0] * 100)
    assert scaler._recorder.steps == 103


def test_a_disabled_scaler_has_no_history(model, optimizer):
    scaler = polycast.grad_scaler("cpu", torch.bfloat16)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.history == ScalerHistory()
    assert scaler.state_dict() == {}


def test_the_state_has_the_history(scaler, model, optimizer):
    take(scaler, model, optimizer, 0.0, INF)
    resumed = polycast.grad_scaler("cpu", torch.float16, growth_interval=2, model=model)
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    copies = [resumed, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))]
    assert [each.history for each in copies] == [scaler.history] * 3
    take(resumed, model, optimizer, INF)
    assert [(skip.step, skip.scale) for skip in resumed.history.skipped] == [(1, 1024.0), (2, 512.0)]


def test_states_are_exchanged_with_torchs_scaler(scaler, model, optimizer):
    take(scaler, model, optimizer, INF)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.get_scale() == 512.0
    scaler.load_state_dict(theirs.state_dict())
    assert scaler.history == ScalerHistory()


def test_a_state_with_another_history_is_refused_before_it_is_loaded(scaler):
    state = {**scaler.state_dict(), "scale": 2.0, "history": {"steps": "many"}}
    with pytest.raises(ValueError, match="^it is not the history of a scaler: ValueError: invalid literal"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 1024.0


def test_a_history_is_bounded():
    recorder = HistoryRecorder()
    for _ in range(MAX_SKIPPED + 5):
        recorder.add(1.0, SkippedStep(0, 1.0))
    history = recorder.history()
    assert (history.skips, len(history.skipped), history.scales) == (MAX_SKIPPED + 5, MAX_SKIPPED, ((0, 1.0),))
    assert history.skipped[-1].step == MAX_SKIPPED + 4


@pytest.mark.parametrize("scale", [2.0, INF])  # which JSON lacks
def test_a_history_is_json_safe_and_what_a_later_version_wrote_is_ignored(scale):
    origin = Origin("aten::mm", "backward", "0", "inf", "float16", ("train.py:3 step",))
    history = ScalerHistory(3, ((0, scale),), 1, (SkippedStep(1, scale, ("weight",), 1, 2, origin),))
    values = json.loads(json.dumps(history.to_dict(), allow_nan=False))
    (skip,) = values["skipped"]
    skip["new"] = skip["origin"]["new"] = 1
    assert ScalerHistory.from_dict(values) == history


def test_a_listener_tells_the_origin_and_sees_each_step(scaler, model, optimizer):
    origin = Origin("aten::mm", "backward", "0", "inf", "float16")
    steps = []
    listener = SimpleNamespace(
        origin=lambda scaler: origin, updated=lambda scaler, scale, skip: steps.append((scale, skip))
    )
    listeners.add(listener)
    try:
        take(scaler, model, optimizer, 0.0, INF)
    finally:
        listeners.remove(listener)
    (skip,) = scaler.history.skipped
    assert skip.origin == origin
    assert str(origin) == "aten::mm in '0' (backward, float16): inf"
    assert steps == [(1024.0, None), (1024.0, skip)]


def test_a_scaler_of_another_library_records_from_then_on_unless_its_class_is_another(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    take(scaler, model, optimizer, INF)
    assert recording(scaler, model) is scaler
    take(scaler, model, optimizer, INF)
    assert [skip.parameters for skip in scaler.history.skipped] == [("0.weight",)]
    assert scaler.history.scales == ((0, 2.0),)
    assert recording(type("Other", (torch.amp.GradScaler,), {})("cpu")) is None


def test_the_model_is_held_weakly():
    model = layers()
    scaler = polycast.grad_scaler("cpu", torch.float16, model=model)
    assert scaler.has_names
    del model
    gc.collect()
    assert not scaler.has_names


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, without the state of its base class; with it, hooks that are not called."""

    def __init__(self, inner, has_hooks):
        self.inner = inner
        if has_hooks:
            self._optimizer_step_pre_hooks = {}

    param_groups = property(lambda self: self.inner.param_groups)

    def step(self, closure=None):
        return self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


@pytest.mark.parametrize("has_hooks", [False, True])
def test_an_optimizer_that_calls_no_hooks_takes_its_steps(has_hooks, model):
    scaler = polycast.grad_scaler("cpu", torch.float16, init_scale=8.0)
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1), has_hooks)
    before = model[0].weight.detach().clone()
    take(scaler, model, optimizer, 1.0)
    assert not torch.equal(model[0].weight, before)
    assert scaler.history.skipped == ()
    take(scaler, model, optimizer, INF, 1.0)
    assert [(each.step, each.scale, each.of) for each in scaler.history.skipped] == [(1, 8.0, 4)]
