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
    shares = {"underflow_share": 0.14, "gradient_underflow_share": 0.5, "overflow_share": 0.01}
    assert {f"polycast/{name}": share for name, share in shares.items()}.items() <= scalars.items()
    assert "polycast/fast_share" not in scalars  # no op ran
    with pytest.raises(TypeError, match="^step must be an int, got 1.5$"):
        seen.log_to(writer, 1.5)


def test_an_observation_is_written_as_a_json_line(seen, path):
    for step in (1, 2):
        seen.log_to(path, step)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["underflow_share"]) for line in lines] == [(1, 0.14), (2, 0.14)]


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


def test_a_run_that_skips_in_a_row_names_the_module_to_keep_in_float32():
    steps = [StepRecord(0, skipped=False), *(skipped(step, 8.0 / 2**step) for step in range(1, 5))]
    loss, found = polycast.RunHistory(steps).findings
    assert (loss.kind, found.kind, found.step) == ("loss_not_finite", "skipped_steps", 1)
    assert found.what == "4 of 5 steps were skipped, up to 4 in a row. The scale fell to 0.5."
    assert found.remedy == (
        "It began in aten::linear in 'up' (forward, float16): inf or nan (4 of 4 skipped steps). The scale has no part "
        "in that. float16 has less range than float32. Keep the module in float32, with "
        "`polycast.apply_policy(model, polycast.Policy(modules={'up': 'fp32'}))`, or use bfloat16."
    )


BEGAN = r"It began in aten::{} in '{}' \({}, {}\): inf or nan \({} of 4 skipped steps\)\. "
REMEDIES = [
    (
        [Origin("aten::log", "forward", "up", "inf", "float32"), *[ORIGIN] * 3],
        BEGAN.format("linear", "up", "forward", "float16", 3) + "The scale",
    ),
    (
        [Origin("aten::index_add_", "forward", "up", "inf", "float16")] * 4,
        r".* Create the tensor that it writes in float32, or use bfloat16\.$",
    ),
    ([None] * 4, r"Pass `rerun=` to `RunLog\.step`.* Gradients of down\.bias were not finite\.$"),
    *(
        (
            [Origin("aten::sqrt", phase, "norm", "inf", dtype)] * 4,
            BEGAN.format("sqrt", "norm", phase, dtype, 4) + ".*a wider dtype does not help",
        )
        for phase in ("forward", "backward")
        for dtype in ("float32", "bfloat16")
    ),
]


def test_the_remedy_for_skips_is_for_the_origin_of_most_of_them(subtests):
    for origins, remedy in REMEDIES:
        with subtests.test(origins=origins):
            steps = [skipped(step, origin=origin) for step, origin in enumerate(origins)]
            assert re.match(remedy, polycast.RunHistory(steps).findings[-1].remedy)


def test_the_first_scale_is_no_finding_unless_the_loss_is_not_finite_either():
    first = [StepRecord(step, loss=1.0, skipped=True) for step in range(8)]
    later = [StepRecord(step, loss=1.0, skipped=False) for step in range(8, 12)]
    assert polycast.RunHistory(first + later).findings == ()
    assert {found.kind for found in polycast.RunHistory(first).findings} == {"skipped_steps"}
    single = [StepRecord(step, loss=1.0, skipped=step in (0, 1, 50)) for step in range(100)]
    assert polycast.RunHistory(single).findings == ()


def test_a_long_run_that_skips_every_step_has_its_finding():
    steps = [StepRecord(step, 1.0, 2.0, step > 0) for step in range(100_000)]
    (finding,) = polycast.RunHistory(steps).findings
    assert finding.what.startswith("99,999 of 100,000 steps were skipped, up to 99,999 in a row.")


@pytest.mark.parametrize(("scale", "remedy"), [(None, "Scale the loss"), (2.0, "Use bfloat16")])
def test_gradients_that_underflow_are_found_from_a_tenth_on(scale, remedy):
    for share, percent in ((0.41, "41%"), (0.1, "10%")):
        steps = [StepRecord(step, scale=scale, gradient_underflow_share=share) for step in range(3)]
        (found,) = polycast.RunHistory(steps).findings
        what = f"up to {percent} of the values of the backward pass underflow, in 3 of 3 observed steps."
        assert (found.kind, found.what) == ("gradient_underflow", what)
        assert found.remedy.startswith(remedy)
    assert polycast.RunHistory([StepRecord(0, scale=scale, gradient_underflow_share=0.09)]).findings == ()


def test_a_history_prints_its_steps_skips_and_findings_as_a_notebook_shows_it():
    skips = (skipped(step, 2.0**-step) for step in range(1, 5))
    history = polycast.RunHistory([StepRecord(0, loss=2.0), *skips, StepRecord(5, loss=1.0)])
    text = str(history)
    cause = "gradients of 2 of 4 parameters: down.bias, up.weight; first aten::linear in 'up' (forward, float16): inf"
    assert text.splitlines()[:2] == [
        "6 steps, loss 2 to 1, 4 skipped",
        f"  steps 1 to 4, scale 0.5 to 0.0625; {cause}",
    ]
    assert "from step 1: 4 of 6 steps were skipped" in text
    assert html.unescape(re.sub("</?p>", "", history._repr_html_())) == text


def test_values_that_a_later_version_wrote_are_ignored():
    values = skipped(1).to_dict()
    for each in (values, values["skip"], values["skip"]["origin"]):
        each["new"] = 1
    assert StepRecord.from_dict(values).skip == skipped(1).skip


@pytest.mark.parametrize("text", ["garbage", "\x89PNG", '{"epoch": 1', '[{"step": 1', '{"step": -1}', "{" * 100_000])
def test_a_file_of_something_else_without_a_last_line_is_refused_and_kept(text, path):
    path.write_text(text)
    for read in (polycast.RunHistory.load, lambda path: polycast.RunLog(path, resume=True).step().__enter__()):
        with pytest.raises(ValueError, match=r"line 1: "):
            read(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", ".*"),
        ("[]", "it is not a step: TypeError: .*"),
        ('{"step": -1}', "it is not a step: ValueError: step must be an int of at least 0, got -1"),
        ('{"step": 1, "loss": "low"}', "it is not a step: ValueError: could not convert string .*"),
        ('{"step": 1, "skipped": 1}', "it is not a step: ValueError: skipped must be true or false, got 1"),
        ('{"step": 1, "computed_by": 1}', "it is not a step: ValueError: computed_by must be a mapping, got 1"),
        ('{"step": 1, "skip": {"parameters": [], "no": 1}}', "it is not a step: TypeError: .*"),
    ],
)
def test_a_file_of_something_else_is_refused(line, text, path):
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=rf"run\.jsonl: line 1: {text}$"):
        polycast.RunHistory.load(path)
