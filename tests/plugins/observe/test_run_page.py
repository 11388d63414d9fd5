"""The contents of the page for runs, and its HTML."""

import re

import pytest

import polycast
from polycast_plugins.observe import Origin, SkippedStep, StepRecord
from polycast_plugins.observe.report.run_page import charts_of, run_page_of, text_of

NAN = float("nan")


def chart(name, *runs):
    (found,) = (each for each in charts_of(runs) if each.name == name)
    return found


def points(path):
    return [tuple(map(float, pair)) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_a_line_runs_from_the_first_step_to_the_last_and_from_the_least_to_the_largest_value():
    (line,) = chart("loss", [StepRecord(step, loss=loss) for step, loss in ((10, 3.0), (15, 1.0), (20, 2.0))]).lines
    assert points(line.path) == [(0.0, 0.0), (500.0, 100.0), (1000.0, 50.0)]
    assert (line.first, line.last) == ("3", "2")


def test_an_axis_is_logarithmic_if_the_values_need_it():
    far = chart("loss", [StepRecord(step, loss=10.0**-step) for step in range(5)])
    assert far.is_log
    assert points(far.lines[0].path)[2] == (500.0, 50.0)
    assert far.ticks == ("1", "0.01", "0.0001")
    assert not chart("loss", [StepRecord(0, loss=1.0), StepRecord(1, loss=2.0)]).is_log
    assert not chart("loss", [StepRecord(0, loss=-1.0), StepRecord(1, loss=2000.0)]).is_log


def test_inf_nan_and_skipped_steps_are_marked_and_the_former_interrupt_the_line():
    (line,) = chart("loss", [StepRecord(step, loss=loss) for step, loss in enumerate([1.0, NAN, 2.0])]).lines
    assert line.path.count("M") == 2
    assert (line.nonfinite, line.nonfinite_count) == ((500,), 1)
    run = [StepRecord(step, loss=1.0, scale=2.0, skipped=step == 1) for step in range(5)]
    assert chart("loss", run).lines[0].marks == chart("scale", run).lines[0].marks == (250,)


def test_a_share_starts_at_zero():
    shares = chart("fast_time_share", [StepRecord(0, fast_time_share=0.5), StepRecord(1, fast_time_share=1.0)])
    assert shares.ticks == ("100%", "50%", "0%")
    assert text_of(0.0004, True) == "0.04%"


def test_two_runs_share_their_axes():
    lines = chart("loss", [StepRecord(0, loss=1.0)], [StepRecord(0, loss=2.0), StepRecord(10, loss=3.0)]).lines
    assert [points(line.path) for line in lines] == [[(0.0, 100.0)], [(0.0, 50.0), (1000.0, 0.0)]]


@pytest.mark.parametrize("steps", [[], [StepRecord(7, loss=NAN)], [StepRecord(7, loss=0.0, scale=0.0)]])
def test_few_steps_are_charted(steps, tmp_path):
    polycast.RunHistory(steps).to_html(tmp_path / "run.html")
    assert "<html" in (tmp_path / "run.html").read_text()


def test_a_long_run_makes_a_small_page_with_its_peaks(tmp_path):
    steps = [StepRecord(step, loss=1.0 + step % 7, scale=2.0, skipped=False) for step in range(50_000)]
    steps[33_333] = StepRecord(33_333, loss=9.0)
    (line,) = chart("loss", steps).lines
    assert min(y for _, y in points(line.path)) == 0.0
    polycast.RunHistory(steps).to_html(tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size < 200_000


def skipped(step, scale, origin=None, name="up.weight"):
    return StepRecord(step, scale=scale, skipped=True, skip=SkippedStep(step, scale, (name,), 1, 4, origin))


def test_steps_skipped_for_the_same_reason_are_one_row():
    page = run_page_of([[skipped(3, 8.0), skipped(4, 4.0), skipped(6, 2.0), skipped(7, 1.0, name="down.weight")]])
    assert [(row.steps, row.scale) for row in page.skipped] == [("3 to 4", "8 to 4"), ("6", "2"), ("7", "1")]


def test_findings_of_two_runs_say_whose_they_are_and_numbers_that_were_not_recorded_are_named():
    bad, good = [StepRecord(step, loss=NAN) for step in range(3)], [StepRecord(0, loss=1.0)]
    assert [each.run for each in run_page_of([bad, good]).found] == ["before"]
    assert [each.run for each in run_page_of([bad]).found] == [""]
    assert run_page_of([good]).missing == ("Scale", "Time in fast dtypes", "Underflow", "Underflow of gradients")


def test_text_of_the_program_is_escaped_and_the_page_loads_nothing(tmp_path):
    origin = Origin("<script>alert(1)</script>", "forward", "<b>", "inf", "float16", ("<i>",))
    polycast.RunHistory([skipped(0, 2.0, origin, "</script><b>")]).to_html(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert [said for said in ("<script>alert", "<i>") if said in text] == []
    assert "&lt;script&gt;alert(1)" in text
    assert "default-src &#39;none&#39;" in text
    assert not re.search(r"(src|href)=\"(?!#|data:,)", text)


def test_a_run_before_that_is_none_is_refused(tmp_path):
    with pytest.raises(TypeError, match="^before must be a polycast.RunHistory or None, got list$"):
        polycast.RunHistory().to_html(tmp_path / "run.html", before=[])
