"""`polycast.profile` and `find`: measured once, kept on disk, trusted only if nobody else can write it."""

import dataclasses
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import polycast
from polycast.registry.registry import registry
from polycast_plugins.fastest import profile_file
from polycast_plugins.fastest.profile import Lookup, find, forget, look_up
from polycast_plugins.fastest.profile_file import Conditions

only_posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has other owners and permissions")


def only_file(kept):
    (path,) = kept.glob("*.json")
    return path


@pytest.fixture
def path(measured, kept):
    """Measure the CPU and return the file of its profile."""
    polycast.profile("cpu")
    return only_file(kept)


def test_the_first_call_measures_and_find_and_the_next_ones_do_not(measured, kept):
    assert find("cpu") is None
    assert not kept.exists()
    found = polycast.profile("cpu")
    assert polycast.profile("cpu") is polycast.profile("cpu:0") is find("cpu") is found
    forget()  # as in another process
    again = polycast.profile("cpu")
    assert again is not found
    assert again == found
    assert measured.count == 1
    assert [path.suffix for path in sorted(kept.iterdir())] == [".json", ".lock"]


def test_find_is_cheap_once_it_has_looked(measured, monkeypatch):
    polycast.profile("cpu")
    find("cpu")
    monkeypatch.setattr(profile_file, "read", None)
    monkeypatch.setattr(Conditions, "now", None)
    assert find("cpu") is not None


def test_refresh_measures_again_and_replaces_the_file(measured, kept):
    first = polycast.profile("cpu")
    second = polycast.profile("cpu", refresh=True)
    assert second != first
    assert find("cpu") is second
    forget()
    assert find("cpu") == second
    only_file(kept)


def test_which_profile_is_used_is_logged(measured, logged, monkeypatch, tmp_path):
    found = polycast.profile("cpu")
    *none, done = (text for _, text in logged.take() if "profile" in text)
    assert set(none) == {"cpu: no profile on disk is used: there is none"}
    assert re.fullmatch(r"cpu: the profile was measured in [0-9.]+ s", done)
    for _ in range(2):
        find("cpu")
    assert logged.take() == []
    forget()
    find("cpu")
    assert logged.take() == [("INFO", f"cpu: the profile on disk is used, measured {found.date}")]
    found.save(tmp_path / "named.json")
    monkeypatch.setenv("POLYCAST_PROFILE", str(tmp_path / "named.json"))
    forget()
    find("cpu")
    assert logged.take() == [("INFO", f"cpu: the profile is that of POLYCAST_PROFILE, measured {found.date}")]


def test_each_number_of_threads_has_a_profile(measured, kept):
    torch.set_num_threads(1)
    first = polycast.profile("cpu")
    torch.set_num_threads(2)
    assert find("cpu") is None
    assert polycast.profile("cpu").threads == 2
    torch.set_num_threads(1)
    assert find("cpu") is first
    assert len(list(kept.glob("*.json"))) == 2


@pytest.mark.parametrize("package", [polycast, torch], ids=["polycast", "torch"])
def test_another_version_measures_for_itself(package, measured, kept, monkeypatch):
    first = polycast.profile("cpu")
    with monkeypatch.context() as patched:
        patched.setattr(package, "__version__", "99.0")
        forget()  # as in another process
        assert look_up("cpu") == Lookup(registry.find("cpu"), None)
        assert polycast.profile("cpu").versions[package.__name__] == "99.0"
    forget()
    assert find("cpu") == first
    assert measured.count == len(list(kept.glob("*.json"))) == 2


@pytest.mark.parametrize(
    "changes",
    [{"device": "another processor"}, {"versions": {"torch": "1.0"}}, {"details": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}],
    ids=lambda changes: "".join(changes),
)
def test_other_conditions_have_another_file(changes):
    now = Conditions.now(polycast.plugin.get_backend("cpu"))
    assert dataclasses.replace(now, **changes).file_name != now.file_name


def test_limits_of_the_instructions_belong_to_the_conditions(monkeypatch):
    backend = polycast.plugin.get_backend("cpu")
    assert Conditions.now(backend).details["capability"] == torch.backends.cpu.get_cpu_capability()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert Conditions.now(backend).details["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_a_backend_registered_by_hand_has_profiles_of_its_own(measured, hand_made):
    polycast.profile("cpu")
    hand_made("cpu")
    assert find("cpu") is None
    assert polycast.profile("cpu").versions["backend"].endswith(".HandMade")
    polycast.plugin.unregister_backend("cpu")
    assert find("cpu").versions["backend"].startswith("polycast ")


def edit(path, field, **values):
    found = polycast.DeviceProfile.load(path)
    dataclasses.replace(found, **{field: {**getattr(found, field), **values}}).save(path)


ELSEWHERE = "{path} was measured elsewhere: its"
REFUSED = {
    "damaged": (lambda path: path.write_text(path.read_text()[:100]), "{path} is damaged: it is not JSON"),
    "binary": (lambda path: path.write_bytes(b"\xff\x00"), "{path} is damaged: 'utf-8' codec can't decode"),
    "edited": (
        lambda path: path.write_text(path.read_text().replace("0.0021", "0.0001")),
        "{path} is damaged: it was changed: its digest differs",
    ),
    "writable by the group": (lambda path: path.chmod(0o660), "{path} can be written by others (-rw-rw----)"),
    "in a writable folder": (lambda path: path.parent.chmod(0o777), "profiles can be written by others"),
    "in a writable cache": (lambda path: path.parent.parent.chmod(0o770), "polycast can be written by others"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "of another processor": (
        lambda path: dataclasses.replace(polycast.DeviceProfile.load(path), device="Z80").save(path),
        f"{ELSEWHERE} device is Z80, and this is ",
    ),
    **{
        f"of another {name}": (
            lambda path, name=name, value=value: edit(path, "versions", **{name: value}),
            f"{ELSEWHERE} version of {name} is {value}, and this is ",
        )
        for name, value in {"torch": "1.0", "polycast": "0.0", "backend": "acme 3"}.items()
    },
    "of a limited torch": (
        lambda path: edit(path, "details", ATEN_CPU_CAPABILITY="avx2"),
        f"{ELSEWHERE} ATEN_CPU_CAPABILITY is avx2, and this is none",
    ),
    "of another user": (lambda path: os.chown(path, 12345, -1), "belongs to another user (uid 12345)"),
    "in a folder of another user": (
        lambda path: os.chown(path.parent, 12345, -1),
        "belongs to another user (uid 12345)",
    ),
}


@only_posix
@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_trusted_is_ignored_with_the_reason(case, path):
    change, reason = REFUSED[case]
    if "another user" in case and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    change(path)
    forget()  # as in another process
    assert find("cpu") is None
    assert reason.format(path=path) in look_up("cpu").refusal


@only_posix
@pytest.mark.parametrize("case", ["damaged", "edited", "writable by the group", "of another torch"])
def test_a_file_that_is_ignored_is_replaced(case, path, measured):
    REFUSED[case][0](path)
    forget()
    again = polycast.profile("cpu")
    assert measured.count == 2
    forget()
    assert find("cpu") == again
    assert path.stat().st_mode & 0o077 == 0


@only_posix
def test_a_folder_that_others_can_write_is_left_alone(path, measured):
    path.parent.chmod(0o777)
    before = path.read_text()
    forget()
    said = r"for this process alone: .*profiles can be written by .* only you can write\.$"
    with pytest.warns(UserWarning, match=said):
        again = polycast.profile("cpu")
    assert polycast.profile("cpu") is again
    assert path.read_text() == before
    assert measured.count == 2
    path.unlink()
    forget()
    assert look_up("cpu").warning is None


def test_a_profile_that_cannot_be_written_gives_a_warning_that_names_the_remedy(measured, kept):
    kept.parent.touch()  # a file in place of the folder
    said = r"for this process alone: \[Errno \d+\] [^.]*\. Set XDG_CACHE_HOME to a folder of yours that has room\.$"
    with pytest.warns(UserWarning, match=f"^polycast measured cpu {said}"):
        assert polycast.profile("cpu") is polycast.profile("cpu")


def test_a_device_that_is_not_there_cannot_be_measured(kept, hand_made):
    hand_made("xpu", availability=lambda: polycast.plugin.Availability(False, "it is unplugged"))
    assert find("xpu") is None
    with pytest.raises(RuntimeError, match="xpu cannot be measured: it is unplugged"):
        polycast.profile("xpu")


@pytest.mark.parametrize("bad", [1, None, "no_such_device"])
def test_what_is_no_device_is_an_error(bad, kept):
    with pytest.raises((ValueError, RuntimeError)):
        polycast.profile(bad)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("stage", ["measuring", "writing"])
def test_an_interruption_leaves_nothing(stage, measured, kept, monkeypatch):
    interrupted = {"measuring": (measured, "instead"), "writing": (os, "replace")}[stage]
    with monkeypatch.context() as patched:
        patched.setattr(*interrupted, interrupt)
        with pytest.raises(KeyboardInterrupt):
            polycast.profile("cpu")
    assert [path.suffix for path in kept.iterdir()] == [".lock"]
    polycast.profile("cpu")
    only_file(kept)


def test_threads_measure_once(measured):
    together = threading.Barrier(8)

    def ask(_):
        together.wait()
        return polycast.profile("cpu")

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(ask, range(8)))) == measured.count == 1


def test_another_process_may_have_measured_meanwhile(measured, kept):
    assert find("cpu") is None
    backend = registry.find("cpu")
    conditions = Conditions.now(backend)
    with profile_file.locked(conditions):
        profile_file.write(conditions, measured(backend))
    polycast.profile("cpu")
    assert measured.count == 1
