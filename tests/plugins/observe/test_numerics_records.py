"""Records of numerics, as values: sums, differences and files."""

import json
from dataclasses import replace

import pytest

from polycast_plugins.observe import Observation
from polycast_plugins.observe.facts import Facts
from polycast_plugins.observe.records import NumericsRecord

RECORD = NumericsRecord(
    "0", "aten::linear", "forward", "float16", 8, 3.0e38, 3, 1, of="weight", source="float32", zeroed=2, nonfinite=1
)


def _seen(*records):
    return Observation(Facts(numerics=records))


def test_sum_adds_counts_and_keeps_the_larger_magnitude():
    other = replace(RECORD, amax=4.0e38, count=2)
    assert (_seen(RECORD) + _seen(other)).numerics == (
        replace(RECORD, count=10, amax=4.0e38, underflowed=6, overflowed=2, zeroed=4, nonfinite=2),
    )


def test_difference_subtracts_counts_and_keeps_the_magnitude_of_the_minuend():
    fewer = replace(RECORD, count=2, amax=4.0e38, underflowed=1, overflowed=1, zeroed=0, nonfinite=0)
    assert (_seen(RECORD) - _seen(fewer)).numerics == (
        replace(RECORD, count=6, amax=3.0e38, underflowed=2, overflowed=0, zeroed=2, nonfinite=1),
    )
    assert (_seen(RECORD) - _seen(RECORD)).numerics == ()


@pytest.mark.parametrize("change", [{"module": None}, {"op": "aten::mm"}, {"role": "backward"}, {"of": "result"}])
def test_records_of_other_values_stay_apart(change):
    other = replace(RECORD, **change)
    assert (_seen(RECORD) + _seen(other)).numerics == (RECORD, other)


def test_file_keeps_them(tmp_path):
    _seen(RECORD).save(tmp_path / "seen.json")
    assert Observation.load(tmp_path / "seen.json").numerics == (RECORD,)
    assert json.loads((tmp_path / "seen.json").read_text())["numerics"][0]["amax"] == 3.0e38


def test_older_file_has_none():
    values = _seen(RECORD).to_dict()
    del values["numerics"]
    assert Observation.from_dict(values).numerics == ()


@pytest.mark.parametrize("amax", [float("inf"), float("nan"), "1"])
def test_file_with_an_invalid_magnitude_is_refused(amax):
    values = _seen(RECORD).to_dict()
    values["numerics"][0]["amax"] = amax
    with pytest.raises(ValueError, match="amax of a NumericsRecord cannot be"):
        Observation.from_dict(values)
