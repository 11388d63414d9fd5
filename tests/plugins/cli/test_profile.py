"""`polycast profile`, and what `devices` and `doctor` show of profiles."""

import dataclasses
import json

import pytest

import polycast
from polycast.toolchain import cache_folder
from polycast_plugins.fastest import measure as measuring
from polycast_plugins.fastest import profile as profiles
from polycast_plugins.fastest.measurement import Measurement
from polycast_plugins.fastest.profile_file import Conditions
from polycast_plugins.fastest.verdict import verdict


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return the folder of the profiles, which is not there yet; measuring takes no time."""
    monkeypatch.delenv("POLYCAST_PROFILE", raising=False)

    def measure(backend):
        now = Conditions.now(backend)
        times = {"float32": 1e-3, "bfloat16": 5e-4, "int8": 2e-4}
        measurements = tuple(Measurement("linear", 128, way, seconds) for way, seconds in times.items())
        of_few_rows = (Measurement("linear", 8, "float32", 1e-4), Measurement("linear", 8, "bfloat16 kernel", 5e-5))
        return polycast.DeviceProfile(
            now.device_type, now.device, now.threads, now.versions, now.details, of_few_rows + measurements, 1e10
        )

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(cache_folder, "cache_directory", lambda: tmp_path / "polycast")
    profiles.forget()
    yield tmp_path / "polycast" / "profiles"
    profiles.forget()


SUMMARY = (
    "cpu: bfloat16 is 2 times as fast as float32 here; decoding: not measured; inference of many rows: int8; "
    "training: a plain region\n"
)


def test_it_prints_a_verdict_and_the_table_only_if_asked(polycast_command, kept):
    done = polycast_command("profile", "cpu")
    assert done.exit_code == 0
    profile = polycast.profile("cpu")
    lines = [profile.heading(), *verdict(profile), "All times: polycast profile cpu --table"]
    assert done.stdout.splitlines() == lines
    assert "polycast: measuring what is fast on cpu" in done.stderr
    assert polycast_command("profile").stderr == ""
    assert polycast_command("profile", "--table").stdout == f"{profile!r}\n"


def test_a_noisy_machine_is_all_that_it_says_and_once(polycast_command, kept, monkeypatch):
    quiet = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda backend: dataclasses.replace(quiet(backend), other_load=0.5))
    first, second = polycast_command("profile", "cpu"), polycast_command("profile", "cpu")
    said = "the measurement is noisy (other processes or a limit took 50% of the processors' time); its times "
    assert first.stdout == second.stdout
    assert first.stdout.startswith(said)
    assert first.stdout.count("\n") == 1
    assert "noisy" not in first.stderr + second.stderr
    assert f"cpu: {first.stdout}" in polycast_command("devices").stdout
    table = polycast_command("profile", "cpu", "--refresh", "--table")
    assert (table.stderr.count("noisy"), table.stdout.count(said)) == (1, 0)
    monkeypatch.setattr(measuring, "measure", quiet)
    assert polycast_command("profile", "cpu", "--refresh").stdout.splitlines()[1] == SUMMARY[len("cpu: ") : -1]


def test_it_prints_json_for_a_file_that_the_variable_names(polycast_command, kept, tmp_path, monkeypatch):
    said = polycast_command("profile", "cpu", "--json").stdout
    profile = polycast.DeviceProfile.from_json(said)
    assert profile == polycast.profile("cpu")
    (tmp_path / "machine.json").write_text(said)
    monkeypatch.setenv("POLYCAST_PROFILE", str(tmp_path / "machine.json"))
    assert polycast.profile("cpu") == polycast.DeviceProfile.load(tmp_path / "machine.json") == profile


def test_refresh_measures_again(polycast_command, kept):
    polycast_command("profile", "cpu")
    assert "measuring" in polycast_command("profile", "cpu", "--refresh").stderr
    rule = "the result replaces the profile, unless it is noisy and no better."
    assert rule in " ".join(polycast.profile.__doc__.split())
    assert rule in " ".join(polycast_command("profile", "--help").stdout.replace("│", "").split())


def test_it_shows_why_a_file_is_ignored(polycast_command, kept):
    polycast.profile("cpu")
    (path,) = kept.glob("*.json")
    path.write_text("{")
    profiles.forget()
    expected = f"the profile on disk is ignored: {path} is damaged: it is not JSON"
    assert f"cpu: {expected}" in polycast_command("devices").stdout
    assert expected in polycast_command("doctor").stdout
    assert f"polycast: {expected}" in polycast_command("profile", "cpu").stderr
    assert SUMMARY in polycast_command("devices").stdout


def test_unknown_device_and_bad_variable_are_errors(polycast_command, kept, monkeypatch):
    done = polycast_command("profile", "nothing")
    assert done.exit_code == 2
    assert "nothing" in done.stderr
    monkeypatch.setenv("POLYCAST_PROFILE", "/nowhere.json")
    done = polycast_command("profile")
    assert done.exit_code == 2
    said = "polycast: POLYCAST_PROFILE: '/nowhere.json' cannot be used as a profile: No such file"
    assert done.stderr.startswith(said)


def test_devices_and_doctor_show_a_profile_that_there_is_and_make_none(polycast_command, kept):
    assert "profile" not in polycast_command("devices").stdout
    assert "  cpu: none; polycast profile cpu makes one\n" in polycast_command("doctor").stdout
    assert not kept.exists()
    profile = polycast.profile("cpu")
    assert SUMMARY in polycast_command("devices").stdout
    (cpu,) = (each for each in json.loads(polycast_command("devices", "--json").stdout) if each["device_type"] == "cpu")
    assert f"cpu: {cpu['profile']}\n" == SUMMARY
    expected = [profile.heading(), *verdict(profile)]
    assert "".join(f"  {line}\n" for line in expected) in polycast_command("doctor").stdout
    assert json.loads(polycast_command("doctor", "--json").stdout)["profiles"] == expected
