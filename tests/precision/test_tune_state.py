"""Searches that are interrupted and go on from a file."""

import json

import pytest
import torch
from torch import nn

import polycast

FLOAT16 = {"tolerance": 1e-2, "device_type": "cpu", "dtype": torch.float16}


class Interrupting:
    """A metric that is the relative error, and is interrupted when it is called for the n-th time."""

    def __init__(self):
        self.calls, self.interrupt_at = 0, None

    def __call__(self, output, reference):
        self.calls += 1
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        return (output.float() - reference).norm() / reference.norm()


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    with torch.no_grad():
        for n in (2, 7):
            model[n].weight.mul_(1e6)
            model[n + 1].weight.mul_(1e-6)
    return model


@pytest.fixture
def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def state(tmp_path):
    return tmp_path / "search.json"


@pytest.mark.parametrize("at", [1, 2, 3, 6, 10])
def test_a_search_that_was_interrupted_goes_on(model, x, state, at):
    whole, part = Interrupting(), Interrupting()
    expected = polycast.tune(model, x, whole, **FLOAT16)
    part.interrupt_at = at
    with pytest.raises(KeyboardInterrupt):
        polycast.tune(model, x, part, **FLOAT16, state=state)
    kept = json.loads(state.read_text())
    assert len(kept["trials"]) == at - 1
    assert polycast.tune(model, x, part, **FLOAT16, state=state) == expected
    assert part.calls == whole.calls + 1


def test_a_search_that_is_over_evaluates_nothing_again(model, x, state):
    metric = Interrupting()
    first = polycast.tune(model, x, metric, **FLOAT16, state=state)
    calls = metric.calls
    assert polycast.tune(model, x, metric, **FLOAT16, state=state) == first
    assert metric.calls == calls


def test_a_search_that_ran_out_of_budget_goes_on_with_more(model, x, state):
    metric = Interrupting()
    first = polycast.tune(model, x, metric, **FLOAT16, state=state, budget=5)
    assert not first.evidence.is_minimal
    more = polycast.tune(model, x, metric, **FLOAT16, state=state)
    assert more.evidence.is_minimal
    assert metric.calls == len(more.evidence.trials)


def change_weight(model):
    with torch.no_grad():
        model[0].weight[0, 0] += 1.0


@pytest.mark.parametrize(
    ("change", "arguments", "what"),
    [
        (change_weight, {}, "model"),
        (lambda model: model.eval(), {}, "model"),
        (None, {"inputs": torch.ones(4, 8)}, "inputs"),
        (None, {"tolerance": 0.5}, "tolerance"),
        (None, {"dtype": torch.bfloat16}, "dtype"),
        (None, {"over": "ops"}, "over"),
        (None, {"objective": "time"}, "objective"),
        (None, {"metric": lambda output, reference: 0.0}, "metric"),
    ],
    ids=["weight", "mode", "inputs", "tolerance", "dtype", "over", "objective", "metric"],
)
def test_the_file_of_another_search_is_refused(model, x, state, change, arguments, what):
    polycast.tune(model, x, **FLOAT16, state=state, budget=2)
    content = state.read_bytes()
    if change is not None:
        change(model)
    arguments = {"inputs": x, **FLOAT16, **arguments}
    with pytest.raises(
        ValueError, match=rf"^state='.*search\.json' is of another search: its {what} was .* now\. Name"
    ):
        polycast.tune(model, **arguments, state=state)
    assert state.read_bytes() == content


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1, "of": {}}', "not json", '{"schema": "1"'], ids=str)
def test_what_is_no_state_file_is_refused(model, x, state, content):
    state.write_text(content)
    with pytest.raises(ValueError, match=r"^state='.*search\.json' is not a state file of polycast\.tune"):
        polycast.tune(model, x, **FLOAT16, state=state)
    assert state.read_text() == content


def test_a_file_of_a_newer_schema_is_refused(model, x, state):
    state.write_text('{"schema": 2, "of": {}}')
    with pytest.raises(ValueError, match=r"is of schema 2, and this polycast reads schema 1: remove it to begin anew$"):
        polycast.tune(model, x, **FLOAT16, state=state)


def test_a_file_that_cannot_be_written_is_an_os_error(model, x, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        polycast.tune(model, x, **FLOAT16, state=tmp_path / "nowhere" / "state.json")
