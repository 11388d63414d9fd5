"""Steps of a RunLog in unusual loops: several optimizers and scalers, reruns that fail, unusual gradients."""

import copy
import pickle

import pytest
import torch

import polycast
from polycast_plugins.observe import Origin, ScalerHistory, SkippedStep, StepRecord, grad_scaler

pytestmark = pytest.mark.usefixtures("engine")

INF = float("inf")


def scaler_of(**options):
    return polycast.grad_scaler("cpu", torch.float16, init_scale=16.0, **options)


def layer_and_optimizer():
    layer = torch.nn.Linear(2, 1)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1)


def backward(scaler, layer, factor=1.0):
    scaler.scale((layer(torch.ones(1, 2)) * factor).sum()).backward()


def take(scaler, layer, optimizer, factor=1.0):
    optimizer.zero_grad()
    backward(scaler, layer, factor)
    scaler.step(optimizer)
    scaler.update()


def test_a_step_with_two_scalers_is_skipped_if_one_of_them_skips():
    (first, one), (second, two) = layer_and_optimizer(), layer_and_optimizer()
    log = polycast.RunLog(model=torch.nn.ModuleList([first, second]))
    with log.step():
        take(scaler_of(), first, one, INF)
        take(scaler_of(), second, two)
    (record,) = log.history.steps
    assert (record.skipped, record.skip.count) == (True, 2)


def test_updates_of_one_scaler_in_one_step_are_one_record():
    (first, one), (second, two) = layer_and_optimizer(), layer_and_optimizer()
    scaler, log = scaler_of(), polycast.RunLog()
    with log.step():
        take(scaler, first, one, INF)
        take(scaler, second, two)
    (record,) = log.history.steps
    assert (record.skipped, record.scale) == (True, 8.0)


def test_a_rerun_that_fails_does_not_stop_the_run():
    (layer, optimizer), scaler = layer_and_optimizer(), scaler_of()
    log = polycast.RunLog(model=layer)

    def rerun():
        raise StopIteration("no more batches")

    with log.step(rerun):
        backward(scaler, layer, INF)
        with pytest.warns(UserWarning, match="the rerun of a skipped step failed: StopIteration: no more batches"):
            scaler.step(optimizer)
        scaler.update()
    (record,) = log.history.steps
    assert (record.skipped, record.skip.origin) == (True, None)


def test_a_fused_optimizer_on_a_device_names_its_parameters_in_a_log(monkeypatch):
    monkeypatch.setattr(grad_scaler, "_is_asynchronous", lambda tensor: True)
    layer = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True), scaler_of()
    log = polycast.RunLog(model=layer)
    for factor in (1.0, INF):
        with log.step():
            take(scaler, layer, optimizer, factor)
    assert [record.skipped for record in log.history.steps] == [False, True]
    assert log.history.skipped[0].parameters == ("bias", "weight")[: log.history.skipped[0].count]
    assert scaler.history.skipped == log.history.skipped


def test_parameters_are_frozen_and_groups_edited_between_steps():
    layer, scaler = torch.nn.Linear(2, 1), scaler_of()
    optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.1)
    layer.bias.requires_grad_(False)
    optimizer.param_groups[0]["params"].pop()  # as pruning does; "param_names" has two names now
    take(scaler, layer, optimizer, INF)
    (skip,) = scaler.history.skipped
    assert skip.parameters == ("group 0, parameter 0 (1, 2)",)


def test_a_closure_is_refused_as_by_torch_and_nothing_is_recorded():
    layer, scaler = torch.nn.Linear(2, 1), scaler_of()
    optimizer = torch.optim.LBFGS(layer.parameters())
    backward(scaler, layer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)
    assert scaler.history == ScalerHistory()


def test_an_exception_in_the_optimizer_is_no_skipped_step():
    (layer, optimizer), scaler = layer_and_optimizer(), scaler_of()
    fails = optimizer.register_step_pre_hook(lambda *arguments: 1 / 0)
    backward(scaler, layer)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    fails.remove()
    scaler.update()
    assert scaler.history.skips == 0
    assert len(optimizer._optimizer_step_pre_hooks) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda log: pickle.loads(pickle.dumps(log))], ids=["copy", "pickle"])
def test_a_history_is_copied(copied):
    log = polycast.RunLog()
    with log.step() as step:
        step.log(loss=float("nan"))
    assert str(copied(log.history).steps) == str(log.history.steps)


def test_a_scale_that_is_infinite_is_written(path):
    (layer, optimizer), scaler = layer_and_optimizer(), scaler_of()
    log = polycast.RunLog(path)
    with log.step():
        backward(scaler, layer)
        scaler.update(INF)
        take(scaler, layer, optimizer)
    (record,) = log.history.steps
    assert (record.skip.scale, record.skipped) == (INF, True)


def test_texts_are_ascii_for_streams_of_any_encoding():
    origin = Origin("aten::mm", "forward", "schicht_\N{GREEK SMALL LETTER BETA}", "inf", "float16")
    skip = SkippedStep(0, 2.0, ("\N{SNOWMAN}.weight",), 1, 1, origin)
    record = StepRecord(0, 1.0, 2.0, True, skip=skip)
    for shown in (origin, skip, ScalerHistory(1, ((0, 2.0),), 1, (skip,)), polycast.RunHistory([record])):
        assert "\\u" in str(shown)
        assert str(shown).isascii()


def test_the_step_after_a_skipped_one_is_observed_to_find_the_first_op():
    (layer, optimizer), scaler = layer_and_optimizer(), scaler_of()
    log = polycast.RunLog(model=layer, nonfinite="record")
    for factor in (1.0, 1e38, 1e38, 1.0, 1.0):
        with log.step():
            take(scaler, layer, optimizer, factor)
    steps = log.history.steps
    assert [record.fast_time_share is None for record in steps] == [True, True, False, False, True]
    assert [skip.origin is None for skip in log.history.skipped] == [True, False]


def test_a_log_is_pickled_for_processes_that_are_spawned(path):
    model = torch.nn.Linear(2, 1)
    log = pickle.loads(pickle.dumps(polycast.RunLog(path, model=model, schedule=2)))
    log.watch(model)
    with log.step() as step:
        step.log(loss=1.0)
    assert log.history.steps[0].loss == 1.0
    assert log.observation.run.model == "Linear"
