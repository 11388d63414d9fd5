"""The precision plugin and the callback for Lightning, in its Trainer."""

import copy

import pytest
import torch

import polycast

lightning = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is in the extra 'test'")

from pytorch_lightning.plugins.precision import MixedPrecision  # noqa: E402

from polycast_plugins.integrations.lightning import LogSteps, Observe, Precision  # noqa: E402


class Regression(lightning.LightningModule):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.losses = []

    def training_step(self, batch):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs).float(), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def precision(**settings):
    return Precision("bf16-mixed", "cpu", **settings)


@pytest.fixture
def fit(layers, data, tmp_path):
    """Return a function that trains a copy of the model for four steps with a precision plugin."""

    def fit(plugin, checkpoint=None, kind=Regression, **settings):
        model = kind(copy.deepcopy(layers))
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            plugins=[plugin],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **{"callbacks": [], "max_epochs": 2, **settings},
        )
        trainer.fit(model, torch.utils.data.DataLoader(data, 16), ckpt_path=checkpoint, weights_only=True)
        return model, trainer

    return fit


@pytest.fixture
def resume(fit, tmp_path):
    """Return a function that resumes a run of one plugin with another, and returns the model."""

    def resume(saved, resumed, **settings):
        _, trainer = fit(saved)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        return fit(resumed, tmp_path / "run.ckpt", **settings)[0]

    return resume


@pytest.mark.parametrize(("bits", "logs"), [("bf16-mixed", 0), ("16-mixed", 0), ("16-mixed", 1)])
def test_without_settings_the_losses_are_those_of_lightning(bits, logs, fit, engine):
    theirs = fit(MixedPrecision(bits, "cpu"))[0]
    ours = fit(Precision(bits, "cpu"), callbacks=[LogSteps(polycast.RunLog()) for _ in range(logs)])[0]
    assert len(ours.losses) == 4
    assert ours.losses == theirs.losses


def test_a_weight_that_a_step_uses_again_has_the_gradients_of_lightning(fit, engine):
    class Again(Regression):
        def training_step(self, batch):
            x, targets = batch
            for _ in range(8):
                x = torch.tanh(self.layers[0](x)[:, :8])
            loss = torch.nn.functional.mse_loss(x.float().sum(1, keepdim=True), targets)
            self.losses.append(loss.item())
            return loss

    theirs, ours = (fit(plugin("bf16-mixed", "cpu"), kind=Again)[0].losses for plugin in (MixedPrecision, Precision))
    assert ours == theirs


def test_the_policy_applies(fit, layers, policy, dtypes, engine):
    found = []
    plugin = precision(policy=policy)

    class Recorded(lightning.Callback):
        def on_train_start(self, trainer, module):
            found.append(dtypes(module.layers))

    fit(plugin, callbacks=[Recorded()])
    assert found == [[torch.bfloat16, torch.float32, torch.float32]]


def test_a_cache_is_used(fit, native):
    cache = polycast.WeightCache()
    fit(precision(cache=cache))
    assert cache.stats().misses > 0


def test_a_resumed_run_uses_the_policy_of_its_checkpoint(resume, policy, engine):
    plugin = precision()
    model = resume(precision(policy=policy, recipe="fastest"), plugin)
    assert plugin.settings.policy == policy
    assert plugin.settings.recipe == polycast.Fastest()
    assert polycast.rules_of(model) == {"layers.2": "**.2 = 'fp32'"}


def test_a_scaler_is_restored_too(resume):
    resumed = Precision("16-mixed", "cpu")
    resume(Precision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=4.0)), resumed)
    assert resumed.scaler.get_scale() == 4.0


def test_the_history_of_the_scaler_is_in_the_checkpoint(resume):
    saved, resumed = (
        Precision("16-mixed", "cpu", scaler=polycast.grad_scaler("cpu", torch.float16, init_scale=scale))
        for scale in (4.0, 8.0)
    )
    resume(saved, resumed)
    assert resumed.scaler.history == saved.scaler.history
    assert resumed.scaler.history.steps == 4


def test_a_checkpoint_of_lightnings_plugin_is_loaded(resume):
    resume(MixedPrecision("bf16-mixed", "cpu"), precision())


def test_some_steps_are_observed(fit, tmp_path):
    callback = Observe(tmp_path / "report.html", first=1, steps=2)
    fit(precision(), callbacks=[callback])
    assert sum(region.entries for region in callback.observation.regions) == 2
    assert {each.kind for each in callback.observation.modules} >= {"Regression", "Linear"}
    assert "<html" in (tmp_path / "report.html").read_text()


def test_a_run_that_fails_keeps_what_was_observed(fit, tmp_path):
    class Failing(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 2:
                raise ZeroDivisionError

    callback = Observe(tmp_path / "report.html", first=0, steps=100)
    with pytest.raises(ZeroDivisionError):
        fit(precision(), callbacks=[callback, Failing()])
    assert sum(region.entries for region in callback.observation.regions) == 2
    assert (tmp_path / "report.html").is_file()


WRONG = [
    (lambda: precision(policy={"relo": "fp32"}), ValueError, "relo"),
    (lambda: precision(recipe="int9"), ValueError, "int9"),
    (lambda: precision(cache=True), TypeError, "^cache must be a polycast.WeightCache or None, got True$"),
    (lambda: Observe(first=-1), ValueError, "^first must be at least 0, got -1$"),
    (lambda: Observe(steps=0), ValueError, "^steps must be at least 1, got 0$"),
    (lambda: Observe(steps=1.5), TypeError, "^steps must be an int, got 1.5$"),
    (lambda: LogSteps(None), TypeError, r"^log must be a polycast.RunLog"),
    (lambda: LogSteps("run.jsonl"), TypeError, r"^log must be a polycast.RunLog"),
]


def test_wrong_arguments_are_refused(subtests):
    for make, error, message in WRONG:
        with subtests.test(message=message), pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize("engine", ["reference"], indirect=True)
def test_observing_on_the_reference_engine_is_refused(fit, engine):
    with pytest.raises(RuntimeError, match="^polycast.observe needs the native engine"):
        fit(precision(), callbacks=[Observe(first=0)])


def test_a_module_is_under_the_rules_of_its_latest_run(policy, layers, engine):
    model = Regression(layers)
    for plugin in [precision(policy=policy)] * 2:
        plugin.convert_module(model)
        assert list(polycast.rules_of(model)) == ["layers.2"]
    precision(policy=polycast.Policy(modules={"layers.0": "fp32"})).convert_module(model)
    assert list(polycast.rules_of(model)) == ["layers.0"]


def test_a_log_has_the_loss_the_scale_and_the_skipped_steps(fit, tmp_path):
    log = polycast.RunLog(tmp_path / "run.jsonl", schedule=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugin = Precision("16-mixed", "cpu", scaler=scaler)
    model, _ = fit(plugin, callbacks=[LogSteps(log, tmp_path / "run.html"), OverflowingScaler()])
    steps = log.history.steps
    assert [record.loss for record in steps] == pytest.approx(model.losses)
    assert [(record.step, record.scale, record.skipped) for record in steps] == [
        (0, 8.0, False),
        (1, 8.0, True),
        (2, 4.0, False),
        (3, 4.0, False),
    ]
    assert steps[1].skip.parameters == ("layers.2.weight",)
    assert [record.fast_time_share is None for record in steps] == [False, True, False, True]
    assert "<svg" in (tmp_path / "run.html").read_text()


class OverflowingScaler(lightning.Callback):
    def on_after_backward(self, trainer, module):
        if trainer.global_step == 1:
            module.layers[2].weight.grad.fill_(float("inf"))


def test_batches_that_are_accumulated_are_one_step_of_a_log(fit):
    log = polycast.RunLog()
    model, _ = fit(precision(), callbacks=[LogSteps(log)], accumulate_grad_batches=2)
    means = [(first + second) / 2 for first, second in zip(model.losses[::2], model.losses[1::2], strict=True)]
    assert [record.loss for record in log.history.steps] == pytest.approx(means)


class TwoOptimizers(Regression):
    automatic_optimization = False

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self):
        return [torch.optim.SGD(self.layers[at].parameters(), lr=0.1) for at in (0, 2)]


@pytest.mark.parametrize("kind", [Regression, TwoOptimizers])
def test_a_resumed_run_continues_its_log(fit, tmp_path, kind):
    path = tmp_path / "run.jsonl"
    for checkpoint, epochs in ((None, 2), (tmp_path / "run.ckpt", 3)):
        log = polycast.RunLog(path)
        others = {"callbacks": [LogSteps(log), LogSteps(polycast.RunLog())], "kind": kind}
        _, trainer = fit(precision(), checkpoint, max_epochs=epochs, **others)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert [record.step for record in log.history.steps] == list(range(6))


def test_testing_a_checkpoint_does_not_set_a_log_back(fit, tmp_path):
    log, path = polycast.RunLog(), tmp_path / "run.ckpt"

    class Saves(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                trainer.save_checkpoint(path)

    model, trainer = fit(precision(), callbacks=[LogSteps(log), Saves()], kind=WithTestStep)
    data = trainer.train_dataloader
    trainer.test(model, data, ckpt_path=path, weights_only=True)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, data)
    assert [record.step for record in log.history.steps] == list(range(6))


class WithTestStep(Regression):
    def test_step(self, batch):
        pass


def test_an_interrupted_run_keeps_its_steps(fit, tmp_path):
    class Failing(lightning.Callback):
        def on_after_backward(self, trainer, module):
            if trainer.global_step == 2:
                raise ZeroDivisionError

    path, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    with pytest.raises(ZeroDivisionError):
        fit(precision(), callbacks=[LogSteps(polycast.RunLog(path), page), Failing()])
    assert [record.step for record in polycast.RunHistory.load(path).steps] == [0, 1]
    assert page.is_file()
