"""The settings of regions with recipe "fastest": kept for each profile."""

import sys

import pytest
from tests.core.region.made_region import made

import polycast
from polycast import autocast
from polycast_plugins.fastest.profile import forget

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def named(tmp_path, monkeypatch, profile_of):
    """Return a function that lets POLYCAST_PROFILE name a profile, in which bfloat16 takes a time; it returns that."""

    def name(ratio):
        profile = profile_of(bfloat16=ratio)
        path = tmp_path / f"{ratio}.json"
        profile.save(path)
        monkeypatch.setenv("POLYCAST_PROFILE", str(path))
        forget()  # reads the variable again
        return profile

    return name


def profile_used(recipe="fastest"):
    return made("cpu", recipe=recipe)._settings.override.recipe.profile


def test_fastest_is_read_once_for_each_profile_until_it_is_forgotten(named, tmp_path, profile_of):
    for ratio in (0.5, 1.5, 0.5):
        assert named(ratio) == profile_used() == profile_used(polycast.Fastest())
    other = profile_of(bfloat16=3.0)
    other.save(tmp_path / "0.5.json")
    assert profile_used() != other
    forget()
    assert profile_used() == other


def test_a_changed_file_that_the_recipe_names_is_read_after_a_refresh(profile_of, tmp_path):
    path, profiles = tmp_path / "machine.json", [profile_of(bfloat16=ratio) for ratio in (0.5, 2.5)]

    def used():
        return profile_used(polycast.Fastest(str(path)))

    profiles[0].save(path)
    assert used() == profiles[0]
    profiles[1].save(path)
    assert used() == profiles[0]
    polycast.plugin.refresh("cpu")
    assert used() == profiles[1]


@pytest.mark.parametrize("engine", ["native"], indirect=True)
def test_the_native_engine_runs_no_python_of_its_own(named):
    named(0.5)
    with autocast("cpu", recipe="fastest"):  # chooses the engine
        pass
    made("cpu", recipe="fastest")
    seen = []

    def note(frame, event, _):
        seen.append((event, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        with autocast("cpu", recipe="fastest"):
            pass
    finally:
        sys.setprofile(None)
    assert [name for event, name in seen if event == "call"] == ["__new__", "is_dynamo_compiling"]
