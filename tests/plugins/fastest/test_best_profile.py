"""Noisy profiles are kept until a better one is measured, so that each process does not measure again."""

import pytest

import polycast
from polycast.registry.registry import registry
from polycast_plugins.fastest import profile_file
from polycast_plugins.fastest.profile import find, forget
from polycast_plugins.fastest.profile_file import Conditions


@pytest.mark.parametrize("noise", [{"noisy": True}, {"other_load": 0.31}], ids=["times differ", "busy"])
def test_a_noisy_profile_is_kept_with_a_message_until_a_better_one_is_measured(noise, measured, kept, capsys):
    vars(measured).update(noise)
    first = polycast.profile("cpu")
    assert first.is_noisy
    why = "repeated times differ" if measured.noisy else "other processes or a limit took 31% of the processors' time"
    assert (
        f"polycast: the measurement is noisy ({why}), so the times will be used until you measure again while the "
        "machine is idle: polycast profile cpu --refresh. Or set POLYCAST_PROFILE to a profile from --output.\n"
    ) in capsys.readouterr().err
    forget()  # as in another process
    assert polycast.profile("cpu") == first
    assert (measured.count, capsys.readouterr().err) == (1, "")
    measured.noisy, measured.other_load = False, 0.1
    assert polycast.profile("cpu", refresh=True).date == "2026-05-02 09:30 UTC"
    forget()
    assert find("cpu").date == "2026-05-02 09:30 UTC"


def test_the_least_noisy_profile_is_kept(measured, kept, capsys):
    for load, date in ((0.4, 1), (0.5, 1), (0.3, 3), (0.1, 4), (0.2, 4), (0.12, 6)):
        measured.other_load = load
        assert polycast.profile("cpu", refresh=True).date == f"2026-05-0{date} 09:30 UTC"
        forget()
        assert find("cpu").date == f"2026-05-0{date} 09:30 UTC"
    said = (
        "took 20% of the processors' time), so the profile of 2026-05-04 09:30 UTC will be used until you measure again"
    )
    assert said in capsys.readouterr().err


def test_a_process_that_waits_for_another_one_says_so(measured, kept, monkeypatch, capsys):
    monkeypatch.setattr(profile_file, "_QUIET_WAIT", 0.0)
    monkeypatch.setattr(profile_file, "_LONGEST_WAIT", 0.1)
    with profile_file.locked(Conditions.now(registry.find("cpu"))):
        polycast.profile("cpu")
    assert "polycast: waiting for another process that measures cpu ...\n" in capsys.readouterr().err
