"""``prepare`` for Accelerate."""

import contextlib
import copy
import pickle
import types

import pytest
import torch

import polycast

accelerate = pytest.importorskip("accelerate", reason="accelerate is in the extra 'test'")

from polycast_plugins.integrations.accelerate import prepare  # noqa: E402

from .conftest import dtypes_in_a_region  # noqa: E402


@pytest.fixture
def accelerator():
    """Return a function that makes an accelerator, as a new process would."""

    def make(precision="bf16"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return accelerate.Accelerator(mixed_precision=precision, cpu=True)

    yield make
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(accelerator, model, data, log=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, batches = accelerator.prepare(optimizer, torch.utils.data.DataLoader(data, 8))
    losses = []
    for inputs, targets in batches:
        with contextlib.nullcontext() if log is None else log.step() as step:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if log is not None:
                step.log(loss=loss)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_without_settings_the_losses_are_those_of_accelerate(precision, accelerator, layers, data, engine):
    runner = accelerator(precision)
    theirs = train(runner, runner.prepare(copy.deepcopy(layers)), data)
    ours = train(runner, prepare(runner, copy.deepcopy(layers)), data)
    assert len(ours) == 4
    assert ours == theirs


def test_the_policy_and_the_cache_apply(accelerator, layers, data, policy, dtypes, native):
    found, cache = dtypes(layers), polycast.WeightCache()
    runner = accelerator()
    train(runner, prepare(runner, layers, policy=policy, cache=cache), data)
    assert found == [torch.bfloat16, torch.float32, torch.float32]
    assert cache.stats().misses > 0


def test_a_resumed_run_uses_the_policy_of_its_checkpoint(accelerator, layers, policy, tmp_path, engine):
    runner = accelerator()
    prepare(runner, copy.deepcopy(layers), policy=policy, recipe="fastest")
    runner.save_state(str(tmp_path))
    runner = accelerator()
    model = prepare(runner, copy.deepcopy(layers))
    assert polycast.rules_of(model) == {}
    runner.load_state(str(tmp_path))
    assert polycast.rules_of(model) == {"2": "**.2 = 'fp32'"}


@pytest.mark.parametrize("modules", [{"**.2": "fp32"}, {"": "fp32"}])
def test_a_copy_of_a_prepared_model_computes_with_its_own_weights(modules, accelerator, layers, engine):
    model = prepare(accelerator(), layers, policy=polycast.Policy({"relu": "fp32"}, modules=modules))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert copied(torch.ones(1, 8)) == 0
        assert model(torch.ones(1, 8)) != 0


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "both": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_wrapped_model_has_rules_of_its_own(copied, accelerator, layers, engine):
    rules = polycast.apply_policy(layers, polycast.Policy({"relu": "fp32"}, modules={"2": "fp32"}))
    copy.copy(layers.forward)  # takes no place
    model = accelerator().prepare(layers)
    one, other = copied(model), copied(copied(model))
    assert "" in polycast.rules_of(one)
    assert polycast.rules_of(one) == polycast.rules_of(other) == polycast.rules_of(model)
    rules.remove()
    polycast.remove_policy(other)
    assert polycast.rules_of(other) == {}
    assert [dtypes_in_a_region(each)[1:] for each in (model, one, other)] == [
        [torch.bfloat16, torch.bfloat16],
        [torch.float32, torch.float32],
        [torch.bfloat16, torch.bfloat16],
    ]
    polycast.apply_policy(other, {"relu": "fp32"})
    assert dtypes_in_a_region(other)[1:] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_prepared_model_has_settings_of_its_own(copied, accelerator, layers, engine):
    runner = accelerator()
    model = prepare(runner, layers, policy=polycast.Policy({"relu": "fp32"}, modules={"2": "fp32"}))
    other = copied(model)
    prepare(runner, other, policy={"tanh": "fp32"})
    assert [dtypes_in_a_region(each)[1:] for each in (model, other, copied(other))] == [
        [torch.float32, torch.float32],
        [torch.bfloat16, torch.bfloat16],
        [torch.bfloat16, torch.bfloat16],
    ]


def test_a_forward_with_rules_that_is_bound_to_another_module_is_refused(accelerator, layers):
    polycast.apply_policy(layers, {"relu": "fp32"})
    model = accelerator().prepare(layers)
    other = torch.nn.Sequential()
    other.forward = types.MethodType(model.forward.__func__, other)
    with pytest.raises(TypeError, match="was bound to a Sequential that is no deep copy of its module. Use copy.deep"):
        other(torch.ones(1, 8))


def test_an_unwrapped_model_runs_under_its_rules(accelerator, layers, engine):
    runner = accelerator()
    polycast.apply_policy(layers, polycast.Policy({"relu": "fp32"}))
    model = runner.unwrap_model(prepare(runner, layers), keep_fp32_wrapper=False)
    assert "" in polycast.rules_of(model)
    assert dtypes_in_a_region(model) == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_log_is_saved_and_continued(accelerator, layers, data, tmp_path):
    path, state = tmp_path / "run.jsonl", str(tmp_path / "state")
    runner, log = accelerator(), polycast.RunLog(path)
    model = prepare(runner, copy.deepcopy(layers), log=log)
    assert log.model is not None
    train(runner, model, data, log)
    runner.save_state(state)
    train(runner, model, data, log)
    runner, log = accelerator(), polycast.RunLog(path)
    model = prepare(runner, copy.deepcopy(layers), log=log)
    runner.load_state(state)
    train(runner, model, data, log)
    assert [record.step for record in log.history.steps] == list(range(8))


def test_the_scaler_of_the_accelerator_is_recorded(accelerator, layers):
    runner = accelerator()
    runner.scaler = torch.amp.GradScaler("cpu")  # on a GPU, mixed_precision="fp16" makes one
    prepare(runner, layers, log=polycast.RunLog())
    assert runner.scaler.history.steps == 0
    assert runner.scaler.has_names


def test_what_is_no_log_is_refused(accelerator, layers):
    with pytest.raises(TypeError, match=r"^log must be a polycast.RunLog or None, got 'run.jsonl'$"):
        prepare(accelerator(), layers, log="run.jsonl")
