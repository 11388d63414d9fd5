"""Searches that are interrupted and continue from a file."""

import json

import pytest
import torch
from torch import nn

import polycast

FLOAT16 = {"tolerance": 1e-2, "device_type": "cpu", "dtype": torch.float16}


class Interrupting:
    """The relative error as a metric, interrupted at the n-th call."""

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
def test_an_interrupted_search_continues(model, x, state, at):
    whole, part = Interrupting(), Interrupting()
    expected = polycast.tune(model, x, whole, **FLOAT16)
    part.interrupt_at = at
    with pytest.raises(KeyboardInterrupt):
        polycast.tune(model, x, part, **FLOAT16, state=state)
    kept = json.loads(state.read_text())["trials"] if at > 1 else []
    assert len(kept) == at - 1
    assert polycast.tune(model, x, part, **FLOAT16, state=state) == expected
    assert part.calls == whole.calls + 1 + (at > 1)  # the region without a policy is evaluated again


def test_a_finished_search_repeats_only_the_region_without_a_policy(model, x, state):
    metric = Interrupting()
    first = polycast.tune(model, x, metric, **FLOAT16, state=state)
    calls = metric.calls
    assert polycast.tune(model, x, metric, **FLOAT16, state=state) == first
    assert metric.calls == calls + 1


def test_a_search_that_ran_out_of_budget_continues_with_more(model, x, state):
    metric = Interrupting()
    first = polycast.tune(model, x, metric, **FLOAT16, state=state, budget=5)
    assert not first.evidence.is_minimal
    more = polycast.tune(model, x, metric, **FLOAT16, state=state)
    assert more.evidence.is_minimal
    assert metric.calls == len(more.evidence.trials) + 1


def change_weight(model):
    with torch.no_grad():
        model[0].weight[0, 0] += 1.0


@pytest.mark.parametrize(
    ("change", "arguments", "what"),
    [
        (change_weight, {}, "model"),
        (lambda model: model.eval(), {}, "model"),
        (None, {"data": torch.ones(4, 8)}, "inputs"),
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
    arguments = {"data": x, **FLOAT16, **arguments}
    with pytest.raises(
        ValueError, match=rf"^state='.*search\.json' belongs to another search: its {what} was .* now\. Name"
    ):
        polycast.tune(model, **arguments, state=state)
    assert state.read_bytes() == content


def written(of="{}", order="null", trials="[]"):
    return f'{{"schema": 1, "of": {of}, "order": {order}, "trials": {trials}}}'


TRIAL = '{"members": [], "distance": 1.0}'
BROKEN = {
    "nothing": ("", "Expecting value"),
    "a list": ("[]", "the file must be of type dict, got list"),
    "an empty object": ("{}", "it has no 'schema'"),
    "no order": ('{"schema": 1, "of": {}}', "it has no 'order'"),
    "no JSON": ("not json", "Expecting value"),
    "half of it": ('{"schema": 1', "Expecting ',' delimiter"),
    "not UTF-8": (b"\xff", "'utf-8' codec can't decode byte 0xff"),
    "a list of what it is of": (written(of="[]"), "its 'of' must be of type dict, got list"),
    "a schema that is a bool": ('{"schema": true, "of": {}}', "its schema must be of type int, got bool"),
    "an order that is a text": (written(order='"0"'), "its 'order' must be of type list, got str"),
    "an order of numbers": (written(order="[0]"), r"its 'order' must be a list of texts, got \[0\]"),
    "trials that are an object": (written(trials="{}"), "its 'trials' must be of type list, got dict"),
    "a trial that is a number": (written(trials="[1]"), "a trial must be of type dict, got int"),
    "a trial without a distance": (written(trials='[{"members": []}]'), "it has no 'distance'"),
    "members that are a text": (
        written(trials=TRIAL.replace("[]", '"0"').join("[]")),
        "'members' must be of type list",
    ),
    "kept that is a text": (
        written(trials='[{"members": [], "distance": 1, "kept": "0"}]'),
        "'kept' must be of type list",
    ),
    "an error that is a number": (
        written(trials='[{"members": [], "distance": 1, "error": 1}]'),
        "an 'error' must be of",
    ),
    "a distance in words": (
        written(trials=TRIAL.replace("1.0", '"far"').join("[]")),
        "a distance must be a number or 'inf'",
    ),
    "a distance that is nan": (
        written(trials=TRIAL.replace("1.0", "NaN").join("[]")),
        "a distance must be .*, got nan",
    ),
    "a distance that is a bool": (
        written(trials=TRIAL.replace("1.0", "true").join("[]")),
        "a distance must be .*, got True",
    ),
    "a distance without end": (
        written(trials=TRIAL.replace("1.0", "1" + "0" * 400).join("[]")),
        "a distance is too large",
    ),
    "lists in lists": ("[" * 100_000, "it is nested too deeply"),
    "objects in objects": (written(of='{"a":' * 100_000 + "1" + "}" * 100_000), "it is nested too deeply"),
}


@pytest.mark.parametrize(("content", "problem"), BROKEN.values(), ids=BROKEN)
def test_invalid_state_files_are_refused(x, state, content, problem):
    content = content if isinstance(content, bytes) else content.encode()
    state.write_bytes(content)
    expected = (
        rf"^state='.*search\.json' is not a state file of polycast\.tune \({problem}.*\): remove it to start over$"
    )
    with pytest.raises(ValueError, match=expected):
        polycast.tune(nn.Linear(8, 8), x, **FLOAT16, state=state)
    assert state.read_bytes() == content


def rewritten(state, change):
    said = json.loads(state.read_text())
    change(said)
    state.write_text(json.dumps(said))


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.update(order=["", "0", "9"]),
        lambda said: said.update(order=["", "0"]),
        lambda said: said.update(order=["", "0", "1", "1"]),
        lambda said: said["trials"][1].update(members=["9"]),
        lambda said: said["trials"][1].update(kept=["9"]),
    ],
    ids=["another name", "a name less", "a name twice", "another member", "another one kept"],
)
@pytest.mark.parametrize("over", ["modules", "ops"])
def test_a_file_with_other_candidates_is_refused(x, state, change, over):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    polycast.tune(model, x, **FLOAT16, over=over, state=state)
    rewritten(state, change)
    expected = rf"belongs to another search: its {over} are not the {over} that the model calls; .* Name another file"
    with pytest.raises(ValueError, match=expected):
        polycast.tune(model, x, **FLOAT16, over=over, state=state)


def test_a_file_without_trials_is_started_over(model, x, state):
    polycast.tune(model, x, **FLOAT16, state=state, budget=2)
    rewritten(state, lambda said: said.update(trials=[]))
    assert polycast.tune(model, torch.ones(4, 8), **FLOAT16, state=state).met


def test_a_file_of_a_newer_schema_is_refused(model, x, state):
    state.write_text('{"schema": 2, "of": {}}')
    with pytest.raises(ValueError, match=r"is of schema 2, and this polycast reads schema 1: remove it to start over$"):
        polycast.tune(model, x, **FLOAT16, state=state)


def test_a_file_that_cannot_be_written_is_an_os_error(model, x, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        polycast.tune(model, x, **FLOAT16, state=tmp_path / "nowhere" / "state.json")
