"""`DeviceProfile`: times and ratios between measurements, JSON, files, and tables."""

import copy
import json
import math
import pickle

import pytest

import polycast
from polycast_plugins.fastest.measurement import Measurement, Omission

MEASURED = [
    *(Measurement("linear", rows, "float32", 1e-3 * rows, 2**20) for rows in (1, 4, 16)),
    Measurement("linear", 1, "bfloat16", 5e-4, 2**20),
    Measurement("linear", 4, "bfloat16", 4e-3, 2**20, noisy=True),
    Measurement("linear", 16, "bfloat16", 3.2e-2, 2**20, extrapolated=True),
    Measurement("linear", 1, "float32", 1e-5, 2**12),
    Measurement("linear", 1, "bfloat16", 2e-5, 2**12),
    Measurement("linear", 1, "int8", 2e-4, 2**20),
    Measurement("cast", 1, "to bfloat16", 1e-6),
    Measurement("cast", 1024, "to bfloat16", 2e-6),
]


def made(measurements=MEASURED, **changes):
    values = {
        "device_type": "cpu",
        "device": "A <fast> processor",
        "threads": 4,
        "versions": {"torch": "2.13.0", "polycast": "0.1.0"},
        "details": {"capability": "AVX2"},
        "measurements": tuple(measurements),
        "bandwidth": 4e10,
        "omissions": (Omission("bmm", "int8", "it has no weight"),),
        "other_load": 0.05,
        "date": "2026-05-01 09:30 UTC",
    }
    return polycast.DeviceProfile(**{**values, **changes})


RATIOS = [
    ("of the measurements", {1: 0.5, 4: 1.0, 16: 2.0}, None),
    ("interpolated in the logarithm of rows", {2: 0.75}, None),
    ("the nearest beyond the measurements", {10**6: 2.0}, None),
    ("the nearest beyond the smallest size", {1: 2.0}, 1),
    ("the nearest beyond the largest size", {1: 0.5}, 2**40),
    ("interpolated in the logarithm of the size", {1: 1.25}, 2**16),
]


def test_ratios_between_and_beyond_the_measurements(subtests):
    for what, ratios, size in RATIOS:
        with subtests.test(what=what):
            found = {rows: made().ratio("linear", rows, "bfloat16", size=size) for rows in ratios}
            assert found == pytest.approx(ratios)


def test_the_order_of_measurements_does_not_matter_for_ratios():
    assert made(reversed(MEASURED)).ratio("linear", 2, "bfloat16") == made().ratio("linear", 2, "bfloat16")


@pytest.mark.parametrize(("op", "way"), [("linear", "float16"), ("conv2d", "bfloat16"), ("cast", "to bfloat16")])
def test_a_ratio_that_was_not_measured_is_none(op, way):
    assert made().ratio(op, 1, way) is None


SECONDS = [
    (("linear", 1, "float32"), 1e-3),
    (("linear", 2, "float32"), 2e-3),
    (("linear", 160, "float32"), 0.16),
    (("linear", 1, "float32", 2**16), 1e-4),
    (("linear", 1, "float32", 2**21), 1e-3 + (1e-3 - 1e-5) * 2**20 / (2**20 - 2**12)),
    (("cast", 32, "to bfloat16"), math.sqrt(2) * 1e-6),
    (("linear", 1, "float16"), None),
]


def test_seconds_are_interpolated_on_logarithmic_scales_and_grow_beyond():
    assert [made().seconds(*args) for args, _ in SECONDS] == [pytest.approx(expected) for _, expected in SECONDS]


def test_a_time_that_is_only_that_of_a_call_does_not_grow_beyond():
    found = made([Measurement("linear", rows, "float32", 2e-5) for rows in (1, 4, 1024)])
    assert found.seconds("linear", 2**20, "float32") == 2e-5


def test_ways_are_listed_by_op():
    assert made().ways("linear") == ("float32", "bfloat16", "int8")
    assert made().ways("bmm") == ()


def test_profiles_with_equal_contents_are_equal():
    one, other = made(), made(versions={"polycast": "0.1.0", "torch": "2.13.0"})
    assert one == other != made(threads=2)
    assert hash(one) == hash(other)
    assert one.digest == other.digest != made(threads=2).digest
    assert len(one.digest) == 16
    assert one != "cpu"


def test_a_profile_cannot_be_changed():
    found = made()
    with pytest.raises(AttributeError):
        found.threads = 1
    with pytest.raises(TypeError):
        found.versions["torch"] = "3"


def test_copies_pickles_and_files_are_equal(tmp_path):
    found = made()
    found.save(tmp_path / "cpu.json")
    copies = copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))
    for each in (*copies, polycast.DeviceProfile.from_json(found.to_json())):
        assert each == found
    assert polycast.DeviceProfile.load(tmp_path / "cpu.json") == found


def changed(**changes):
    return json.dumps({**json.loads(made().to_json()), **changes})


def with_measurement(rows=1, seconds=1.0):
    return changed(measurements=[{"op": "linear", "rows": rows, "way": "float32", "seconds": seconds}])


BAD = {
    "empty": ("", "it is not JSON"),
    "cut off": (made().to_json()[:-40], "it is not JSON"),
    "too deep": ("[" * 10**5, "it is not JSON"),
    "a list": ("[]", "it is not a profile of format 2"),
    "another format": (changed(format=1), "it is not a profile of format 2"),
    "a changed value": (changed(threads=3), "it was changed: its digest differs"),
    "an unknown key": (changed(more=1), "unexpected keyword argument 'more'"),
    "no measurements": (changed(measurements=None), "it is not a profile"),
    "a wrong type": (changed(threads="4"), "wrong values of threads"),
    "a negative bandwidth": (changed(bandwidth=-1), "wrong values of bandwidth"),
    "a negative load": (changed(other_load=-1), "wrong values of other_load"),
    "nan": (changed(bandwidth=math.nan), "wrong values of bandwidth"),
    "a negative time": (with_measurement(seconds=-1.0), "wrong values of measurements"),
    "no rows": (with_measurement(rows=0), "wrong values of measurements"),
    "a version that is a number": (changed(versions={"torch": 2}), "wrong values of versions"),
    "versions that are a list": (changed(versions=[1]), "it is not a profile"),
}


def test_a_text_that_is_no_profile_is_refused(subtests):
    for case, (text, reason) in BAD.items():
        with subtests.test(case=case), pytest.raises(ValueError, match=reason):
            polycast.DeviceProfile.from_json(text)


def test_a_file_that_is_no_profile_is_refused(tmp_path, subtests):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").touch()
    remedy = r"Write one with `polycast profile --json > PATH`\.$"
    for name, reason in {
        "none": "No such file",
        "binary": ".*decode",
        "empty": "it is not JSON",
        ".": "Is a dir",
    }.items():
        said = f"cannot be used as a profile: {reason}.* {remedy}"
        with subtests.test(name=name), pytest.raises(ValueError, match=said):
            polycast.DeviceProfile.load(tmp_path / name)


def test_the_table_shows_ratios_marks_and_omissions():
    text = repr(made())
    assert text.isascii()
    assert "cpu: A <fast> processor, 4 threads, reads 40 GB/s" in text
    lines = {tuple(line.split()) for line in text.splitlines()}
    assert ("linear", "1", "1", "M", "1", "ms", "0.50", "0.20") in lines
    assert ("linear", "4", "1", "M", "4", "ms", "1.00~", "-") in lines
    assert ("linear", "16", "1", "M", "16", "ms", "2.00*", "-") in lines
    assert "Not measured: bmm in int8: it has no weight" in text


def test_the_html_table_is_escaped():
    page = made()._repr_html_()
    assert "A &lt;fast&gt; processor" in page
    assert "<td>1.00~</td>" in page
