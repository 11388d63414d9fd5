"""Records of numerics as values, findings about underflow and overflow, and the table of the report."""

import json
from dataclasses import replace

import pytest
import torch

import polycast
from polycast_plugins.observe import Observation
from polycast_plugins.observe.facts import Facts
from polycast_plugins.observe.records import NumericsRecord
from polycast_plugins.observe.report import render
from polycast_plugins.observe.report.page import page_of

INPUTS = "what they are computed from."
SCALE = "Scale the loss (`polycast.grad_scaler`), or use bfloat16."
NARROW = (
    "Keep the module in float32, with `polycast.apply_policy(model, polycast.Policy(modules={'3': 'fp32'}))`, or use "
    "bfloat16."
)


def _seen(*records):
    return Observation(Facts(numerics=records))


def _record(module="3", role="backward", dtype="float16", **counts):
    return NumericsRecord(module, "aten::mm", role, dtype, **{"count": 100, "amax": 1.0, **counts})


RECORD = NumericsRecord(
    "0", "aten::linear", "forward", "float16", 8, 3.0e38, 3, 1, of="weight", source="float32", zeroed=2, nonfinite=1
)


def test_sum_adds_counts_and_keeps_the_larger_magnitude():
    both = replace(RECORD, count=10, amax=4.0e38, underflowed=6, overflowed=2, zeroed=4, nonfinite=2)
    assert (_seen(RECORD) + _seen(replace(RECORD, amax=4.0e38, count=2))).numerics == (both,)


def test_difference_subtracts_counts_and_keeps_the_magnitude_of_the_minuend():
    fewer = replace(RECORD, count=2, amax=4.0e38, underflowed=1, overflowed=1, zeroed=0, nonfinite=0)
    more = replace(RECORD, count=6, amax=3.0e38, underflowed=2, overflowed=0, zeroed=2, nonfinite=1)
    assert (_seen(RECORD) - _seen(fewer)).numerics == (more,)
    assert (_seen(RECORD) - _seen(RECORD)).numerics == ()


@pytest.mark.parametrize("change", [{"module": None}, {"op": "aten::mm"}, {"role": "backward"}, {"of": "result"}])
def test_records_of_other_values_stay_apart(change):
    other = replace(RECORD, **change)
    assert (_seen(RECORD) + _seen(other)).numerics == (RECORD, other)


def test_file_keeps_them_and_has_a_finite_magnitude(tmp_path, subtests):
    path = tmp_path / "seen.json"
    _seen(RECORD).save(path)
    assert Observation.load(path).numerics == (RECORD,)
    values = json.loads(path.read_text())
    assert values["numerics"][0]["amax"] == 3.0e38
    for amax in (float("inf"), float("nan"), "1"):
        values["numerics"][0]["amax"] = amax
        with subtests.test(amax=amax), pytest.raises(ValueError, match="amax of a NumericsRecord cannot be"):
            Observation.from_dict(values)


UNDERFLOWS = [
    (_record(underflowed=41), f"gradients of 3: 41% underflow in float16. {SCALE}"),
    (_record(underflowed=41, zeroed=8), f"gradients of 3: 41% underflow in float16, 8% to zero. {SCALE}"),
    (_record(underflowed=100), f"gradients of 3: 100% underflow in float16. {SCALE}"),
    (_record(count=100_000, underflowed=99_999), f"gradients of 3: over 99% underflow in float16. {SCALE}"),
    (_record("", underflowed=41), f"gradients of the model: 41% underflow in float16. {SCALE}"),
    (_record(None, underflowed=41), f"gradients outside of the model's modules: 41% underflow in float16. {SCALE}"),
    (_record(role="forward", underflowed=10), f"values of 3: 10% underflow in float16. {NARROW}"),
    (_record(role="forward", of="weight", underflowed=10), f"weights of 3: 10% underflow in float16. {NARROW}"),
    (
        _record(dtype="bfloat16", underflowed=50),
        f"gradients of 3: 50% underflow in bfloat16. bfloat16 has the exponents of float32: scale {INPUTS}",
    ),
    (
        _record(role="forward", dtype="float32", underflowed=50),
        f"values of 3: 50% underflow in float32. Scale {INPUTS}",
    ),
    (_record(underflowed=9), None),
    (_record(nonfinite=100), None),
    (_record(count=0), None),
]


def test_underflow_is_found_from_a_tenth_on(subtests):
    for record, text in UNDERFLOWS:
        with subtests.test(record=record, text=text):
            assert [str(found) for found in _seen(record).findings] == ([] if text is None else [text])


def test_records_of_a_module_are_one_finding_and_the_worst_module_is_first():
    records = [
        _record("1", underflowed=20),
        NumericsRecord("1", "aten::to.dtype", "backward", "float16", 300, 1.0, 180, of="activation", source="float32"),
        _record("2", underflowed=80),
    ]
    first, second = _seen(*records).findings
    assert (first.module, second.module, second.count) == ("2", "1", 200)
    assert second.what == "50% underflow in float16."
    assert second.ops == ("aten::mm", "aten::to.dtype")


def test_overflow_is_found_in_forward_and_backward():
    forward, backward = (_record(role=role, overflowed=2, amax=65504.0) for role in ("forward", "backward"))
    texts = [str(found) for found in _seen(forward, backward).findings]
    what = "2 of 100 became inf or nan in float16, in aten::mm. The largest finite magnitude was 6.55e+04."
    assert texts[0].startswith(
        f"values of 3: {what} float16 has less range than float32. Keep the module in float32, with "
    )
    assert texts[1].startswith(f"gradients of 3: {what} float16 has less range than float32. Scale the loss")


def test_overflow_of_a_cast_that_the_program_asks_for_is_not_cured_by_a_policy():
    cast = NumericsRecord("3", "aten::to.dtype", "forward", "float8_e5m2", 10, 1e6, 0, 5, "activation", "float32")
    (found,) = _seen(cast).findings
    assert found.remedy == "The program casts them to float8_e5m2: scale or clamp them first, or use bfloat16."


def test_findings_of_a_difference_are_about_what_is_more():
    before, after = _seen(_record(underflowed=41)), _seen(_record(underflowed=41), _record("4", underflowed=12))
    assert [found.module for found in (after - before).findings] == ["4"]
    assert (before - after).findings == ()


def test_training_in_float16_without_scaling_is_found(engine):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def found(dtype, scale):
        with polycast.observe(model, numerics=True) as seen:
            with polycast.autocast("cpu", dtype):
                loss = model(torch.randn(8, 16)).float().square().mean()
            (loss * 1e-5 * scale).backward()
        return {finding.module for finding in seen.findings if finding.kind == "underflow"}

    assert found(torch.float16, 1.0) >= {"0", "2"}
    assert found(torch.float16, 2.0**16) == set()
    assert found(torch.bfloat16, 1.0) == set()


def test_report_shows_the_worst_first():
    records = [_record("a"), _record("b", underflowed=7, zeroed=3), _record("c", overflowed=1, nonfinite=4)]
    page = page_of(_seen(*records).facts)
    assert [of[0].module for of in page.numerics] == ["c", "b", "a"]
    text = render(page)
    assert '<a href="#numerics">Numerics</a>' in text
    assert '<td data-of="underflow" class="n">7%</td><td data-of="to zero" class="n">3</td>' in text
    assert "#numerics" not in render(page_of(Facts()))
    text = render(page_of(_seen(_record(underflowed=0)).facts, _seen(_record(underflowed=41)).facts))
    assert '<span class="before"><span class="sr">before: </span>41%</span>' in text
