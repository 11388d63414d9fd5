"""RunLog: the steps of a training run, written as they end."""

import json
import pickle
import platform
import re

import pytest
import torch
from torch.profiler import ProfilerAction

import polycast
from polycast import RunLog
from polycast.registry.registry import registry
from polycast_plugins.observe import StepRecord
from polycast_plugins.observe.conversions import share_of

pytestmark = pytest.mark.usefixtures("engine")


class Training:
    """Training of a small model in float16, one step at a time."""

    def __init__(self, dropout=0.0):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = polycast.grad_scaler("cpu", torch.float16, init_scale=16.0)
        self.factor = 1.0
        self.drawn = []

    def backward(self):
        self.drawn.append(torch.rand(()).item())
        with polycast.autocast("cpu", torch.float16):
            out = self.model(torch.linspace(-1, 1, 32).view(8, 4))
        loss = (out.float() * self.factor).pow(2).mean()
        self.scaler.scale(loss).backward()
        return loss

    def step(self, log, rerun=False, factor=1.0):
        self.factor = factor
        with log.step(rerun=self.backward if rerun else None) as step:
            self.optimizer.zero_grad()
            step.log(loss=self.backward())
            self.scaler.step(self.optimizer)
            self.scaler.update()


def test_each_step_has_loss_scale_and_whether_it_was_skipped():
    training, log = Training(), RunLog()
    for factor in (1.0, 1e5, 1.0):
        training.step(log, factor=factor)
    steps = log.history.steps
    assert [record.step for record in steps] == [0, 1, 2]
    assert [(record.scale, record.skipped) for record in steps] == [(16.0, False), (16.0, True), (8.0, False)]
    assert steps[1].loss > 1e6 * steps[0].loss > 0
    assert all(record.seconds > 0 for record in steps)


def test_a_rerun_finds_the_first_op_of_each_skipped_step():
    training = Training()
    log = RunLog(model=training.model)
    for factor in (1e6, 1.0, 1e6):
        training.step(log, rerun=True, factor=factor)
    skips = log.history.skipped
    assert skips == training.scaler.history.skipped
    assert [skip.parameters[0] for skip in skips] == ["3.bias"] * 2
    origins = [(skip.origin.op, skip.origin.phase, skip.origin.what) for skip in skips]
    assert origins == [("aten::to.dtype_layout", "backward", "inf")] * 2
    assert any("test_run_log.py" in line for line in skips[0].origin.stack)
    first, first_again, second, third, third_again = training.drawn
    assert (first, third) == (first_again, third_again)
    assert len({first, second, third}) == 3


def test_a_rerun_leaves_no_trace():
    def train(rerun):
        training = Training(dropout=0.5)
        log = RunLog(model=training.model)
        for factor in (1.0, 1e6, 1.0):
            training.step(log, rerun=rerun, factor=factor)
        return [*training.model.state_dict().values(), torch.rand(1), *[p.grad for p in training.model.parameters()]]

    assert all(map(torch.equal, train(rerun=True), train(rerun=False)))


def test_an_observed_step_has_the_time_in_fast_dtypes_and_finds_the_first_op():
    training = Training()
    log = RunLog(model=training.model, schedule=2, nonfinite="record")
    for factor in (1.0, 1.0, 1e6):
        training.step(log, factor=factor)
    steps = log.history.steps
    assert [record.fast_time_share is None for record in steps] == [False, True, False]
    assert 0 < steps[0].fast_time_share <= 1
    assert steps[2].fast_time_share == pytest.approx(log.observation.fast_time_share)
    assert steps[2].skip.origin.phase == "backward"
    assert {op.op for op in log.observation.ops} >= {"aten::linear"}


def test_numerics_give_the_share_of_underflow_and_an_op_that_overflowed():
    training = Training()
    log = RunLog(model=training.model, schedule=1, numerics=True)
    training.step(log, factor=1e-6)
    numerics = log.observation.numerics
    gradients = [each for each in numerics if each.role == "backward"]
    training.step(log, factor=1e6)
    small, large = log.history.steps
    assert small.underflow_share == share_of(numerics, "underflowed") > 0
    assert small.gradient_underflow_share == share_of(gradients, "underflowed") > 0
    assert large.skip.origin.phase == "backward"


def test_an_observation_around_the_run_tells_the_first_op_of_the_first_such_step():
    training, log = Training(), RunLog()
    with polycast.observe(training.model, nonfinite="record"):
        for factor in (1.0, 1e6, 1e6):
            training.step(log, factor=factor)
    assert [skip.origin is None for skip in log.history.skipped] == [False, True]


def test_torchs_scaler_is_recorded_if_it_is_given():
    training = Training()
    training.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    log = RunLog(scaler=training.scaler, model=training.model)
    training.step(log)
    assert log.history.steps[0].scale == 16.0


def test_the_first_step_of_each_process_has_what_computed(path, engine):
    training = Training()
    by = {
        "engine": engine,
        "versions": {"polycast": polycast.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "packages": {"cpu": [f"polycast {polycast.__version__}"]},
        "processors": {"cpu": polycast.plugin.get_backend("cpu").device_details()["name"]},
        "num_threads": torch.get_num_threads(),
    }
    log = RunLog(path)
    for _ in range(2):
        training.step(log)
    for again in (RunLog(path, resume=True), pickle.loads(pickle.dumps(log))):
        training.step(again)
        first, second, third = (record.computed_by for record in again.history.steps)
        assert second is None
        for each in (first, third):
            assert by.items() <= each.items()
            assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", each["date"])
            assert each["command"].startswith("python")


def test_a_step_without_regions_or_a_scaler_chooses_no_engine(monkeypatch):
    monkeypatch.setattr(registry, "used", set())
    monkeypatch.setattr("polycast_plugins.observe.packages.choose_engine", None)
    log = RunLog()
    with log.step() as step:
        step.log(loss=2)
    (record,) = log.history.steps
    assert (record.computed_by["engine"], record.computed_by["packages"]) == ("", {})
    assert (record.loss, record.scale, record.skipped) == (2.0, None, None)


def test_a_scaler_of_another_thread_is_not_recorded(in_thread):
    training, log, other = Training(), RunLog(), RunLog()
    with log.step():
        in_thread(lambda: training.step(other))
    assert log.history.steps[0].scale is None
    assert other.history.steps[0].scale == 16.0


def test_each_step_is_in_the_file_when_it_ends(path):
    log = RunLog(path)
    for loss in (1.0, float("nan"), float("-inf")):
        with log.step() as step:
            step.log(loss=loss)
        last = json.loads(path.read_text().splitlines()[-1])
    assert last["loss"] == "-inf"
    assert str([record.loss for record in polycast.RunHistory.load(path).steps]) == "[1.0, nan, -inf]"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_step_that_is_interrupted_keeps_what_it_recorded(error, path):
    log = RunLog(path, schedule=1)

    def interrupted(loss):
        with log.step() as step:
            if loss is not None:
                step.log(loss=loss)
            raise error

    for loss in (3.0, None):
        with pytest.raises(error):
            interrupted(loss)
    assert [record.loss for record in polycast.RunHistory.load(path).steps] == [3.0]
    with log.step() as step:  # and nothing is left open
        step.log(loss=4.0)
    assert [(record.step, record.loss) for record in log.history.steps] == [(0, 3.0), (1, 4.0)]


def test_nothing_is_observed_in_steps_outside_of_the_schedule(monkeypatch):
    from polycast_plugins.observe import observer as observing

    monkeypatch.setattr(observing, "load_observer", lambda: pytest.fail("it was loaded"))
    training, log = Training(), RunLog()
    training.step(log)
    assert log.observation is None


def test_the_model_is_held_weakly():
    log = RunLog(model=torch.nn.Linear(2, 2))
    assert log.model is None


def enter(**arguments):
    RunLog().step(**arguments).__enter__()


def log_loss(loss):
    with RunLog().step() as step:
        step.log(loss=loss)


REFUSED = [
    (
        lambda: RunLog("no/such/run.jsonl"),
        ValueError,
        "no/such/run.jsonl cannot be written: there is no folder no/such",
    ),
    (lambda: RunLog(model=3), TypeError, "model must be a torch.nn.Module or None, got int"),
    (lambda: RunLog(scaler=3), TypeError, "scaler must be a torch.amp.GradScaler or None, got 3"),
    (lambda: RunLog(writer=3), TypeError, "writer must be the path of a file for JSON lines or have add_scalar"),
    (lambda: RunLog(schedule=0), ValueError, r"schedule must be at least 1 \(each step\), or None, got 0"),
    (lambda: RunLog(schedule="all"), TypeError, r"schedule must be an int n \(every n-th step\), torch\.profiler\.sch"),
    (lambda: RunLog(schedule=lambda step: ProfilerAction.WARMUP), ValueError, "schedule=<function <lambda>"),
    (lambda: RunLog(nonfinite="raise"), ValueError, "nonfinite must be one of 'ignore', 'record', got 'raise'"),
    (lambda: RunLog(resume=1), TypeError, "resume must be a bool, got 1"),
    (lambda: enter(rerun=3), TypeError, "rerun must be a function without arguments or None, got 3"),
    (lambda: enter(rerun=print), ValueError, "a rerun restores the gradients of the log's model, which has none. Pass"),
    (
        lambda: log_loss(torch.ones(2, 2)),
        ValueError,
        r"loss must have one element, got a tensor of shape \(2, 2\): log",
    ),
    (lambda: log_loss(torch.tensor(1j)), TypeError, r"loss must be real, got .*torch\.complex64"),
    (lambda: log_loss("2.0"), TypeError, "loss must be a number or a tensor with one element, got '2.0'$"),
    (lambda: log_loss(True), TypeError, "loss must be a number or a tensor with one element, got True$"),
]


def test_bad_arguments_are_refused(subtests):
    for call, kind, text in REFUSED:
        with subtests.test(text=text), pytest.raises(kind, match=f"^{text}"):
            call()


@pytest.mark.parametrize("state", [None, {}, {"steps": -1}, {"steps": True}])
def test_a_bad_state_is_refused(state):
    with pytest.raises(ValueError, match=r"^the state of a RunLog is {'steps': n}, got "):
        RunLog().load_state_dict(state)


def test_records_that_are_written_are_read(path):
    history = polycast.RunHistory([StepRecord(3, 1.0, 2.0, False, 0.1, 0.5, 0.25, 0.125), StepRecord(1)])
    history.save(path)
    assert polycast.RunHistory.load(path) == history
    assert [record.step for record in history.steps] == [1, 3]
    assert path.read_text().splitlines()[0] == '{"step": 1}'


def test_the_command_has_no_values_of_arguments_that_name_secrets(monkeypatch):
    arguments = ["--api-key", "s3", "HF_TOKEN=s3", "--password=s 3", "--max-tokens", "5", "--use-token", "--lr=1"]
    monkeypatch.setattr("sys.orig_argv", ["/bin/python", "train.py", *arguments])
    expected = "python train.py --api-key ... HF_TOKEN=... --password=... --max-tokens 5 --use-token --lr=1"
    with polycast.observe() as seen:
        pass
    assert seen.run.command == expected
