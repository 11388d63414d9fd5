"""Observing the steps that a schedule selects."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerAction, schedule

import polycast
from polycast_plugins.observe import Observation, observer


def _relu():
    with polycast.autocast("cpu"):
        torch.ones(2).relu()


def _calls(seen):
    return sum(op.calls for op in seen.ops if op.op == "aten::relu")


def _observed(select, steps, **options):
    with polycast.observe(schedule=select, **options) as seen:
        for _ in range(steps):
            _relu()
            seen.step()
    return seen


@pytest.mark.parametrize(
    ("select", "observed"),
    [
        (None, 12),
        (1, 12),
        (5, 3),
        (schedule(wait=2, warmup=1, active=1), 3),
        (schedule(wait=1, warmup=1, active=2, skip_first=1, repeat=2), 4),
        (lambda step: ProfilerAction.RECORD if step == 7 else ProfilerAction.NONE, 1),
    ],
    ids=["none", "each", "fifth", "torch", "repeat", "function"],
)
def test_schedule_selects_the_steps(engine, select, observed):
    seen = _observed(select, 12)
    assert _calls(seen) == observed
    assert (seen.run.steps, seen.run.observed_steps) == (12, observed)


def test_numerics_and_modules_follow_the_schedule(engine):
    model = nn.Sequential(nn.ReLU())
    with polycast.observe(model, numerics=True, schedule=2) as seen:
        for _ in range(5):
            with polycast.autocast("cpu"):
                model(torch.ones(3))
            seen.step()
    (record,) = seen.numerics
    assert (record.module, record.count) == ("0", 9)
    assert [module.entries for module in seen.modules] == [3, 3]


def test_time_is_that_of_the_observed_steps(engine, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(observer.time, "perf_counter", lambda: float(next(clock)))
    seen = _observed(2, 3)
    assert seen.run.seconds == 2.0


def test_observation_can_be_read_between_observed_steps(engine):
    with polycast.observe(schedule=2) as seen:
        _relu()
        seen.step()
        assert _calls(seen) == 1
        _relu()
        assert _calls(seen) == 1


def test_an_interrupted_run_keeps_its_observed_steps(engine):
    def run(observer):
        with observer as seen:
            runs.append(seen)
            for step in range(5):
                _relu()
                if step == 3:
                    raise KeyboardInterrupt
                seen.step()

    runs = []
    with pytest.raises(KeyboardInterrupt):
        run(polycast.observe(schedule=2))
    assert (_calls(runs[0]), runs[0].run.steps) == (2, 3)


def test_each_block_begins_with_the_first_step(engine):
    observer = polycast.observe(schedule=schedule(wait=1, warmup=1, active=1, repeat=1))
    for _ in range(2):
        with observer as seen:
            for _ in range(3):
                _relu()
                seen.step()
        assert _calls(seen) == 1


NONE = r"observes none of the first 10,000 steps: it must return torch\.profiler\.Prof"
REFUSED = {
    "no step": (lambda step: ProfilerAction.NONE, ValueError, NONE),
    **{str(select): (select, TypeError, r"schedule must be an int n .* got") for select in ("often", 1.5, True)},
}


@pytest.mark.parametrize(("select", "kind", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_schedule_is_refused(engine, select, kind, said):
    with pytest.raises(kind, match=said):
        polycast.observe(schedule=select)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize(
    ("steps", "remedy"),
    [
        (0, r"Call step\(\) of the observation after each training step: seen\.step\(\)\."),
        (3, r"none of the steps 0 to 3\. Lower the number of steps that it waits or skips\."),
    ],
)
def test_run_without_an_observed_step_warns(engine, steps, remedy):
    with pytest.warns(UserWarning, match=remedy):
        assert _calls(_observed(schedule(wait=100, warmup=0, active=1), steps)) == 0


def test_step_after_the_block_is_refused(engine):
    seen = _observed(None, 1)
    for ended in (seen, Observation.from_dict(seen.to_dict())):
        with pytest.raises(RuntimeError, match="this observation has ended: call step\\(\\) inside the block"):
            ended.step()


def test_step_on_another_thread_is_refused(engine, in_thread):
    with polycast.observe() as seen, pytest.raises(RuntimeError, match="call it there, or observe all threads"):
        in_thread(seen.step)
    with polycast.observe(threads="all") as seen:
        in_thread(seen.step)
    assert seen.run.steps == 1


def test_compiled_code_is_not_compiled_again_for_observed_steps(engine):
    compiled = torch.compile(nn.Sequential(nn.Linear(3, 3)), backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    with polycast.observe(schedule=2) as seen:
        for _ in range(4):
            with polycast.autocast("cpu"):
                compiled(torch.ones(2, 3))
            seen.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
