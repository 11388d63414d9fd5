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


def profile_used():
    return made("cpu", recipe="fastest")._settings.override.recipe.profile


def test_a_profile_that_is_forgotten_is_read_again(named, tmp_path, profile_of):
    named(0.5)
    profile_used()
    other = profile_of(bfloat16=3.0)
    other.save(tmp_path / "0.5.json")
    forget()
    assert profile_used() == other


def test_fastest_is_read_once_for_each_profile(profile_of, monkeypatch, tmp_path):
    paths = [tmp_path / f"{number}.json" for number in range(2)]
    for number, path in enumerate(paths):
        profile_of(bfloat16=0.5 + number).save(path)

    def digests():
        regions = [autocast("cpu", recipe=each) for each in ("fastest", polycast.Fastest())]
        return [region._settings.override.recipe.profile.digest for region in regions]

    def of(path):
        monkeypatch.setenv("POLYCAST_PROFILE", str(path))
        forget()  # reads the variable again
        return digests()

    first, second = of(paths[0]), of(paths[1])
    assert len({*first, *second}) == 2
    assert of(paths[0]) == first
    known = [polycast.DeviceProfile.load(path).digest for path in paths]
    assert [first[0], second[0]] == known


def test_a_changed_file_that_the_recipe_names_is_read_after_a_refresh(profile_of, tmp_path):
    path, profiles = tmp_path / "machine.json", [profile_of(bfloat16=ratio) for ratio in (0.5, 2.5)]

    def used():
        return made("cpu", recipe=polycast.Fastest(str(path)))._settings.override.recipe.profile

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
