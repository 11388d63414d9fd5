"""The profile that is used: the least noisy one, the one that POLYCAST_PROFILE names, or that of the same settings."""

import contextlib
import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import polycast
from polycast.registry.registry import registry
from polycast_backends.cuda import CudaBackend
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
        f"polycast: the measurement is noisy ({why}); its times will be used until you measure again while the "
        "machine is idle: polycast profile cpu --refresh. Or set POLYCAST_PROFILE to a saved profile.\n"
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
    said = "took 20% of the processors' time); the profile of 2026-05-04 09:30 UTC will be used until you measure again"
    assert said in capsys.readouterr().err


def test_a_process_that_waits_for_another_one_says_so(measured, kept, monkeypatch, capsys):
    monkeypatch.setattr(profile_file, "_QUIET_WAIT", 0.0)
    monkeypatch.setattr(profile_file, "_LONGEST_WAIT", 0.1)
    with profile_file.locked(Conditions.now(registry.find("cpu"))):
        polycast.profile("cpu")
    assert "polycast: waiting for another process that measures cpu ...\n" in capsys.readouterr().err


@pytest.fixture
def elsewhere(measured, tmp_path, monkeypatch):
    """A profile of another machine, which POLYCAST_PROFILE names."""
    found = dataclasses.replace(polycast.profile("cpu"), device="Z80", threads=99, versions={"torch": "1.0"})
    found.save(tmp_path / "z80.json")
    monkeypatch.setenv("POLYCAST_PROFILE", str(tmp_path / "z80.json"))
    forget()
    return found


def test_a_named_profile_is_used_whichever_machine_it_is_from(elsewhere, measured, hand_made):
    assert polycast.profile("cpu") == find("cpu") == elsewhere
    assert measured.count == 1
    assert polycast.profile("cpu", refresh=True).device != "Z80"
    assert find("cpu") == elsewhere
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
    expected = rf"^POLYCAST_PROFILE: '{path}' cannot be used as a profile: {reason}.*`polycast profile --json > PATH`"
    for look in (polycast.profile, find):
        with pytest.raises(ValueError, match=expected):
            look("cpu")


@contextlib.contextmanager
def matmuls_of(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SETTINGS = {
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "precision": lambda: matmuls_of("medium"),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_profile_of_other_settings_is_not_used(setting, measured):
    with SETTINGS[setting]():
        unusual = polycast.profile("cpu")
    forget()  # as in another process
    usual = polycast.profile("cpu")
    assert unusual.details.items() > usual.details.items()
    assert measured.count == 2
    for setting_of, expected in ((SETTINGS[setting], unusual), (contextlib.nullcontext, usual)):
        forget()
        with setting_of():
            assert polycast.profile("cpu") == expected
    assert measured.count == 2


def test_the_same_precision_set_again_is_no_other_setting():
    before = Conditions.now(polycast.plugin.get_backend("cpu"))
    with matmuls_of("highest"):
        assert Conditions.now(polycast.plugin.get_backend("cpu")) == before


def test_settings_of_one_device_do_not_change_the_profile_of_another():
    before = Conditions.now(polycast.plugin.get_backend("cpu"))
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert Conditions.now(polycast.plugin.get_backend("cpu")) == before
        assert CudaBackend().device_details().items() >= {("cuDNN attention", "off")}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert "cuDNN attention" not in CudaBackend().device_details()
