"""The callback for the Trainer of transformers."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import polycast

transformers = pytest.importorskip("transformers", reason="transformers is in the extra 'test'")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from polycast_plugins.integrations.transformers import PolycastCallback  # noqa: E402
from polycast_plugins.observe.grad_scaler import recording  # noqa: E402


class Regression(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, labels=None):
        return {"loss": torch.nn.functional.mse_loss(self.layers(x).float(), labels)}


@pytest.fixture
def train(layers, data, tmp_path):
    """Return a function that trains a copy of the model for four steps."""

    def train(callback=None, checkpoint=None, callbacks=(), model=Regression, before=None, **settings):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"),
            use_cpu=True,
            max_steps=4 if checkpoint is None else 6,
            per_device_train_batch_size=16,
            logging_steps=1,
            save_steps=4,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **{"bf16": True, **settings},
        )
        trainer = transformers.Trainer(
            model(copy.deepcopy(layers)),
            arguments,
            train_dataset=[{"x": x, "labels": y} for x, y in data],
            callbacks=[*([] if callback is None else [callback]), *callbacks],
        )
        if before is not None:
            before(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    return train


@pytest.fixture
def checkpoint(tmp_path):
    return str(tmp_path / "run" / "checkpoint-4")


def losses(trainer):
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.parametrize(("bf16", "log"), [(True, None), (False, None), (True, polycast.RunLog)])
def test_without_settings_the_losses_are_those_of_the_trainer(bf16, log, train, engine):
    theirs, ours = train(bf16=bf16), train(PolycastCallback(log=log and log()), bf16=bf16)
    assert len(losses(ours)) == 4
    assert losses(ours) == losses(theirs)


def test_the_policy_and_the_cache_apply(train, layers, policy, native):
    cache = polycast.WeightCache()
    trainer = train(PolycastCallback(policy=policy, cache=cache))
    assert cache.stats().misses > 0
    assert polycast.rules_of(trainer.model) == {"layers.2": "**.2 = 'fp32'"}
    assert dtype_after_relu(trainer) == [torch.float32]


def test_the_checkpoint_has_the_policy_and_the_recipe(train, policy, checkpoint, engine):
    train(PolycastCallback(policy=policy, recipe="fastest"))
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text())["stateful_callbacks"]["PolycastCallback"]
    callback = PolycastCallback.from_state(copy.deepcopy(state))
    assert callback.settings.policy == policy
    assert callback.settings.recipe == polycast.Fastest()
    resumed = train(PolycastCallback(), checkpoint, restore_callback_states_from_checkpoint=True)
    assert polycast.rules_of(resumed.model) == {"layers.2": "**.2 = 'fp32'"}


def test_some_steps_are_observed(train, tmp_path):
    train(PolycastCallback(report=tmp_path / "report.html", first=1, steps=2))
    assert "<html" in (tmp_path / "report.html").read_text()


def dtype_after_relu(trainer):
    found = []
    hook = trainer.model.layers[1].register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    trainer.model(torch.ones(1, 8), torch.ones(1, 1))
    hook.remove()
    return found


def test_a_restored_callback_has_the_policies_for_ops_and_the_cache_that_was_given(train, checkpoint, native):
    train(PolycastCallback(policy={"relu": "fp32"}))
    callback = PolycastCallback(cache=polycast.WeightCache())
    trainer = train(callback, checkpoint, restore_callback_states_from_checkpoint=True)
    assert dtype_after_relu(trainer) == [torch.float32]
    assert callback.settings.cache.stats().misses > 0


def test_a_resumed_run_is_observed(train, checkpoint, tmp_path):
    train(PolycastCallback())
    callback = PolycastCallback(report=tmp_path / "report.html", first=0, steps=1)
    train(callback, checkpoint, restore_callback_states_from_checkpoint=True)
    assert (tmp_path / "report.html").is_file()


def test_a_policy_given_to_a_resumed_run_is_kept_with_a_warning(train, policy, checkpoint, engine):
    train(PolycastCallback(policy=policy))
    callback = PolycastCallback(policy={"tanh": "fp32"})
    with pytest.warns(UserWarning, match="^the run was saved with the policy"):
        trainer = train(callback, checkpoint, restore_callback_states_from_checkpoint=True)
    assert dtype_after_relu(trainer) == [torch.bfloat16]
    assert polycast.rules_of(trainer.model) == {}


def test_a_callback_that_is_added_after_a_run_applies(train, engine):
    trainer = train()
    trainer.add_callback(PolycastCallback(policy={"relu": "fp32"}))
    trainer.train()
    assert dtype_after_relu(trainer) == [torch.float32]


def test_a_second_trainer_of_a_model_uses_its_own_settings(train, policy, layers, engine):
    model = Regression(layers)
    train(PolycastCallback(policy=policy), model=lambda _: model)
    trainer = train(PolycastCallback(recipe="int8"), model=lambda _: model)
    assert dtype_after_relu(trainer) == [torch.bfloat16]
    assert polycast.rules_of(model) == {}


@pytest.mark.parametrize("restored", [False, True])
def test_a_wrapper_of_the_model_is_not_set_up_again(restored, policy, layers):
    model, callback = Regression(layers), PolycastCallback(policy=policy, cache=polycast.WeightCache())
    callback.on_init_end(None, None, None, model=model)
    wrapper, latest = torch.nn.ModuleDict({"model": model}), callback
    if restored:
        latest = PolycastCallback()
        latest.saved_settings = callback.saved_settings
    latest.on_train_begin(None, None, None, model=wrapper)
    assert "forward" not in vars(wrapper)
    assert latest.settings.cache is callback.settings.cache
    assert list(polycast.rules_of(wrapper)) == ["model.layers.2"]


def test_a_model_around_one_that_has_run_is_set_up(policy, layers):
    callback = PolycastCallback(policy=policy)
    callback.on_init_end(None, None, None, model=layers)
    model = torch.nn.Sequential(layers)
    callback.on_init_end(None, None, None, model=model)
    assert "forward" in vars(model)


def test_a_log_has_the_loss_of_each_step(train, tmp_path):
    log = polycast.RunLog(tmp_path / "run.jsonl", schedule=2)
    trainer = train(PolycastCallback(log=log, page=tmp_path / "run.html"))
    assert [(record.step, round(record.loss, 4)) for record in log.history.steps] == [
        (step, round(loss, 4)) for step, loss in enumerate(losses(trainer))
    ]
    assert [record.fast_time_share is None for record in log.history.steps] == [False, True, False, True]
    assert log.model is trainer.model
    assert "<svg" in (tmp_path / "run.html").read_text()


def test_a_model_is_copied_in_a_step_of_a_log(train):
    copies = []

    class Copying(transformers.TrainerCallback):
        def on_optimizer_step(self, arguments, state, control, model=None, **others):
            copies.append(copy.deepcopy(model))

    log = polycast.RunLog()
    train(PolycastCallback(log=log), callbacks=[Copying()])
    assert len(copies) == len(log.history.steps) == 4
    copies[0].train()(torch.ones(1, 8), torch.ones(1, 1))
    assert len(log.history.steps) == 4


class SumOfSquares(Regression):
    """A model whose loss is a share of that of the step, as those of transformers are."""

    accepts_loss_kwargs = True

    def forward(self, x, labels=None, num_items_in_batch=None):
        squares = (self.layers(x).float() - labels).square()
        return {"loss": squares.mean() if num_items_in_batch is None else squares.sum() / num_items_in_batch}


@pytest.mark.parametrize("model", [Regression, SumOfSquares])
def test_batches_that_are_accumulated_are_one_step_of_a_log(train, model):
    log = polycast.RunLog()
    trainer = train(PolycastCallback(log=log), gradient_accumulation_steps=2, model=model)
    assert len(log.history) == trainer.state.global_step == 4
    assert not trainer.model._forward_hooks
    assert [record.loss for record in log.history.steps] == pytest.approx(losses(trainer), rel=1e-4)


def test_a_run_with_a_gradient_scaler_is_recorded(train, policy):
    log = polycast.RunLog(nonfinite="record")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)

    def in_float16(trainer):
        """Do what Accelerate does for fp16=True, which it refuses on a CPU."""
        trainer.accelerator.scaler = scaler
        trainer.accelerator.state._mixed_precision = "fp16"

    train(PolycastCallback(log=log, policy=policy), before=in_float16)
    steps = log.history.steps
    assert [record.skipped for record in steps] == [True] * 4
    assert [record.scale for record in steps] == [2.0**exponent for exponent in (120, 119, 118, 117)]
    assert steps[0].skip.parameters[0] == "layers.2.bias"
    assert [record.skip.origin is None for record in steps] == [True, False, False, False]
    assert steps[1].skip.origin.phase == "backward"


@pytest.mark.parametrize("restored", [True, False], ids=["restored", "new"])
def test_a_resumed_run_continues_its_log(train, restored, checkpoint, tmp_path):
    path = tmp_path / "run.jsonl"
    train(PolycastCallback(log=polycast.RunLog(path)))
    train(PolycastCallback(log=polycast.RunLog(path)), checkpoint, restore_callback_states_from_checkpoint=restored)
    assert [record.step for record in polycast.RunHistory.load(path).steps] == list(range(6))


def test_a_run_that_fails_keeps_its_steps(train, tmp_path):
    class Failing(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise ZeroDivisionError

    path = tmp_path / "run.jsonl"
    log = polycast.RunLog(path)
    callback = PolycastCallback(log=log)
    with pytest.raises(ZeroDivisionError):
        train(callback, callbacks=[Failing()])
    assert [record.step for record in polycast.RunHistory.load(path).steps] == [0, 1]
    train(PolycastCallback(log=log))  # although the Trainer has not said that the step ended
    assert [record.step for record in log.history.steps] == list(range(6))


def test_the_scaler_of_the_accelerator_is_recorded(layers):
    log = polycast.RunLog()
    scaler = torch.amp.GradScaler("cpu")
    callback = PolycastCallback(log=log)
    state = transformers.TrainerState(global_step=0)
    optimizer = SimpleNamespace(scaler=scaler)  # of Accelerate
    callback.on_train_begin(transformers.TrainingArguments(use_cpu=True), state, None, layers, optimizer)
    assert recording(scaler) is scaler
    assert scaler.has_names
    callback.on_train_end(None, state, None)


def test_a_page_without_a_log_is_refused():
    with pytest.raises(TypeError, match=r"^page='run.html' shows the steps of a log: pass log=polycast.RunLog"):
        PolycastCallback(page="run.html")
    with pytest.raises(TypeError, match=r"^log must be a polycast.RunLog or None, got 'run.jsonl'$"):
        PolycastCallback(log="run.jsonl")
