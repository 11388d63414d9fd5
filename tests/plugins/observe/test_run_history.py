"""RunHistory and Observation in the formats of other tools; findings about runs."""

import html
import json
import re

import pytest

import polycast
from polycast_plugins.observe import Observation, Origin, SkippedStep, StepRecord
from polycast_plugins.observe.facts import Facts
from polycast_plugins.observe.records import NumericsRecord

ORIGIN = Origin("aten::linear", "forward", "up", "inf", "float16", ("train.py:3 step",))


def skipped(step, scale=4.0, origin=ORIGIN):
    skip = SkippedStep(step, scale, ("down.bias", "up.weight"), 2, 4, origin)
    return StepRecord(step, loss=float("nan"), scale=scale, skipped=True, skip=skip)


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars.append((tag, scalar_value, global_step))


@pytest.fixture
def seen():
    records = [
        NumericsRecord("", "aten::mm", "forward", "float16", count=90, underflowed=9, overflowed=1),
        NumericsRecord("", "aten::mm", "backward", "float16", count=10, underflowed=5),
    ]
    return Observation(Facts(numerics=tuple(records)))


def test_steps_are_written_as_scalars():
    writer = Writer()
    polycast.RunHistory([StepRecord(3, loss=0.5, scale=8.0, skipped=False)]).log_to(writer)
    assert writer.scalars == [("polycast/loss", 0.5, 3), ("polycast/scale", 8.0, 3), ("polycast/skipped", 0.0, 3)]


def test_an_observation_is_written_as_scalars(seen):
    writer = Writer()
    seen.log_to(writer, 7)
    scalars = {tag: value for tag, value, step in writer.scalars if step == 7}
    assert scalars["polycast/underflow_share"] == 0.14
    assert scalars["polycast/gradient_underflow_share"] == 0.5
    assert scalars["polycast/overflow_share"] == 0.01
    assert "polycast/fast_share" not in scalars  # no op ran


def test_an_observation_is_written_as_a_json_line(seen, tmp_path):
    for step in (1, 2):
        seen.log_to(tmp_path / "seen.jsonl", step)
    first, second = map(json.loads, (tmp_path / "seen.jsonl").read_text().splitlines())
    assert (first["step"], second["step"], first["underflow_share"]) == (1, 2, 0.14)


def test_a_log_writes_to_a_writer_as_it_goes():
    writer = Writer()
    log = polycast.RunLog(writer=writer)
    with log.step() as step:
        step.log(loss=1.0)
    assert ("polycast/loss", 1.0, 0) in writer.scalars


def test_tensorboard_reads_what_is_written(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is in the extra 'test'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        polycast.RunHistory([StepRecord(1, loss=2.0), StepRecord(2, loss=1.0)]).log_to(writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("polycast/loss")] == [(1, 2.0), (2, 1.0)]


@pytest.mark.parametrize("writer", [None, print, 3])
def test_what_is_no_writer_is_refused(writer, seen):
    with pytest.raises(TypeError, match="^writer must be the path of a file for JSON lines or have add_scalar"):
        seen.log_to(writer, 1)
    with pytest.raises(TypeError, match="^writer must be"):
        polycast.RunHistory().log_to(writer)


def test_a_step_that_is_no_int_is_refused(seen):
    with pytest.raises(TypeError, match="^step must be an int, got 1.5$"):
        seen.log_to(Writer(), 1.5)


def test_a_notebook_shows_what_print_does():
    history = polycast.RunHistory([StepRecord(0, loss=2.0), *(skipped(step) for step in range(1, 5))])
    shown = html.unescape(re.sub("</?p>", "", history._repr_html_()))
    assert shown == str(history)
    assert shown.startswith("5 steps, loss 2 to ")


def test_a_run_that_skips_in_a_row_names_the_module_to_keep_in_float32():
    steps = [StepRecord(0, skipped=False), *(skipped(step, 8.0 / 2**step) for step in range(1, 5))]
    kinds = {found.kind: found for found in polycast.RunHistory(steps).findings}
    assert list(kinds) == ["loss_not_finite", "skipped_steps"]
    found = kinds["skipped_steps"]
    assert found.step == 1
    assert found.what == "4 of 5 steps were skipped, up to 4 in a row. The scale fell to 0.5."
    assert found.remedy == (
        "It began in aten::linear in 'up' (forward, float16): inf or nan (4 of 4 skipped steps). The scale has no part "
        "in that. float16 has less range than float32. Keep the module in float32, with "
        "`polycast.apply_policy(model, polycast.Policy(modules={'up': 'fp32'}))`, or use bfloat16."
    )


def test_the_remedy_for_skips_is_for_the_dtype_of_the_op_that_began_most_of_them():
    other = Origin("aten::log", "forward", "up", "inf", "float32")
    steps = [skipped(0, origin=other), *(skipped(step) for step in range(1, 4))]
    remedy = polycast.RunHistory(steps).findings[-1].remedy
    assert remedy.startswith(
        "It began in aten::linear in 'up' (forward, float16): inf or nan (3 of 4 skipped steps). The scale"
    )


NO_DTYPE = (
    r"It began in aten::sqrt in 'norm' \({}, {}\): inf or nan \(4 of 4 skipped steps\)\. .*a wider dtype does not help"
)
REMEDIES = {
    Origin("aten::index_add_", "forward", "up", "inf", "float16"): (
        r".* Create the tensor that it writes in float32, or use bfloat16\.$"
    ),
    None: r"Pass `rerun=` to `RunLog\.step`.* Gradients of down\.bias were not finite\.$",
    **{
        Origin("aten::sqrt", phase, "norm", "inf", dtype): NO_DTYPE.format(phase, dtype)
        for phase in ("forward", "backward")
        for dtype in ("float32", "bfloat16")
    },
}


def test_the_remedy_for_skips_is_for_their_origin(subtests):
    for origin, remedy in REMEDIES.items():
        with subtests.test(origin=origin):
            found = polycast.RunHistory([skipped(step, origin=origin) for step in range(4)]).findings[-1]
            assert re.match(remedy, found.remedy)


def test_the_first_scale_is_no_finding_unless_the_loss_is_not_finite_either():
    first = [StepRecord(step, loss=1.0, skipped=True) for step in range(8)]
    later = [StepRecord(step, loss=1.0, skipped=False) for step in range(8, 12)]
    assert polycast.RunHistory(first + later).findings == ()
    assert {found.kind for found in polycast.RunHistory(first).findings} == {"skipped_steps"}


def test_a_long_run_that_skips_every_step_has_its_finding():
    steps = [StepRecord(step, 1.0, 2.0, step > 0) for step in range(100_000)]
    (finding,) = polycast.RunHistory(steps).findings
    assert finding.what.startswith("99,999 of 100,000 steps were skipped, up to 99,999 in a row.")


def test_single_skips_are_no_finding():
    steps = [StepRecord(step, loss=1.0, skipped=step in (0, 1, 50)) for step in range(100)]
    assert polycast.RunHistory(steps).findings == ()


@pytest.mark.parametrize(("scale", "remedy"), [(None, "Scale the loss"), (2.0, "Use bfloat16")])
def test_gradients_that_underflow_are_found(scale, remedy):
    steps = [StepRecord(step, scale=scale, gradient_underflow_share=0.41) for step in range(3)]
    (found,) = polycast.RunHistory(steps).findings
    assert found.what == "up to 41% of the values of the backward pass underflow, in 3 of 3 observed steps."
    assert found.remedy.startswith(remedy)


@pytest.mark.parametrize(("share", "kinds"), [(0.1, ["gradient_underflow"]), (0.09, [])])
def test_underflow_of_a_tenth_is_found(share, kinds):
    history = polycast.RunHistory([StepRecord(0, gradient_underflow_share=share)])
    assert [found.kind for found in history.findings] == kinds


def test_a_history_prints_its_steps_skips_and_findings():
    skips = (skipped(step, 2.0**-step) for step in range(1, 5))
    text = str(polycast.RunHistory([StepRecord(0, loss=2.0), *skips, StepRecord(5, loss=1.0)]))
    first, second, *_ = text.splitlines()
    assert first == "6 steps, loss 2 to 1, 4 skipped"
    cause = "gradients of 2 of 4 parameters: down.bias, up.weight; first aten::linear in 'up' (forward, float16): inf"
    assert second == f"  steps 1 to 4, scale 0.5 to 0.0625; {cause}"
    assert "from step 1: 4 of 6 steps were skipped" in text


def test_values_that_a_later_version_wrote_are_ignored():
    values = skipped(1).to_dict()
    for each in (values, values["skip"], values["skip"]["origin"]):
        each["new"] = 1
    assert StepRecord.from_dict(values).skip == skipped(1).skip


@pytest.mark.parametrize("text", ["garbage", "\x89PNG", '{"epoch": 1', '[{"step": 1', '{"step": -1}', "{" * 100_000])
def test_a_file_of_something_else_without_a_last_line_is_refused_and_kept(text, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    for read in (polycast.RunHistory.load, lambda path: polycast.RunLog(path, resume=True).step().__enter__()):
        with pytest.raises(ValueError, match=r"line 1: "):
            read(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", r"line 1: .*"),
        ("[]", r"line 1: it is not a step: TypeError: .*"),
        ('{"step": -1}', "line 1: it is not a step: ValueError: step must be an int of at least 0, got -1"),
        ('{"step": 1, "loss": "low"}', "line 1: it is not a step: ValueError: could not convert string .*"),
        ('{"step": 1, "skipped": 1}', "line 1: it is not a step: ValueError: skipped must be true or false, got 1"),
        ('{"step": 1, "skip": {"parameters": [], "no": 1}}', "line 1: it is not a step: TypeError: .*"),
    ],
)
def test_a_file_of_something_else_is_refused(line, text, tmp_path):
    (tmp_path / "run.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=rf"run\.jsonl: {text}$"):
        polycast.RunHistory.load(tmp_path / "run.jsonl")
