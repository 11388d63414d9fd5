"""A profile that POLYCAST_PROFILE names."""

import dataclasses

import pytest

import polycast
from polycast_plugins.fastest.profile import find, forget


@pytest.fixture
def elsewhere(measured, tmp_path, monkeypatch):
    """A profile of another machine, which POLYCAST_PROFILE names."""
    found = dataclasses.replace(polycast.profile("cpu"), device="Z80", threads=99, versions={"torch": "1.0"})
    found.save(tmp_path / "z80.json")
    monkeypatch.setenv("POLYCAST_PROFILE", str(tmp_path / "z80.json"))
    forget()
    return found


def test_a_named_profile_is_used_whichever_machine_it_is_from(elsewhere, measured):
    assert polycast.profile("cpu") == elsewhere
    assert find("cpu") == elsewhere
    assert measured.count == 1


def test_a_named_profile_wins_over_a_new_one(elsewhere, measured):
    assert polycast.profile("cpu", refresh=True).device != "Z80"
    assert find("cpu") == elsewhere


def test_a_named_profile_is_of_its_device_only(elsewhere, hand_made, measured):
    hand_made("xpu")
    assert find("xpu") is None


def test_the_variable_is_read_once(elsewhere, monkeypatch):
    assert find("cpu").device == "Z80"
    for change in (lambda: monkeypatch.setenv("POLYCAST_PROFILE", ""), lambda: monkeypatch.delenv("POLYCAST_PROFILE")):
        change()
        assert find("cpu").device == "Z80"
    forget()
    assert find("cpu").device != "Z80"


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "No such file or directory"), ("", "it is not JSON"), ("{}", "it is not a profile of format 2")],
    ids=["missing", "empty", "another"],
)
def test_a_named_profile_that_is_bad_is_an_error(text, reason, kept, tmp_path, monkeypatch, engine):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("POLYCAST_PROFILE", str(path))
    expected = rf"^POLYCAST_PROFILE: '{path}' cannot be used as a profile: {reason}.*`polycast profile --output PATH`"
    with pytest.raises(ValueError, match=expected):
        polycast.profile("cpu")
    with pytest.raises(ValueError, match=expected):
        find("cpu")
