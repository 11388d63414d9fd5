"""The built-in backends: their dtypes, and the reason that each gives if its device is absent."""

from types import SimpleNamespace

import pytest
import torch

import polycast
from polycast.plugin import Availability

ACCELERATORS = ("cuda", "xpu")
DTYPES = {
    "cpu": (torch.bfloat16, torch.float16),
    "cuda": (torch.float16, torch.bfloat16),
    "maia": (torch.bfloat16, torch.float16),
    "mps": (torch.float16, torch.bfloat16),
    "mtia": (torch.float16, torch.bfloat16),
    "xpu": (torch.float16, torch.bfloat16),
}
WITHOUT = {name: f"torch {torch.__version__} was built without {name.upper()}" for name in DTYPES if name != "cpu"}
WITHOUT["maia"] = "torch.maia is missing: import the package of the Maia driver first"


@pytest.fixture
def answers(monkeypatch):
    """Return a function that has torch say what it was built with, whether a device is there, and has bfloat16."""

    def say(name, *, build=None, available=False, bfloat16=False):
        module = torch.backends.mps if name == "mps" else getattr(torch, name, SimpleNamespace())
        monkeypatch.setattr(torch, "maia", module if build == "maia" else None, raising=False)
        monkeypatch.setattr(module, "is_available", lambda: available, raising=False)
        monkeypatch.setattr(module, "is_bf16_supported", lambda: bfloat16, raising=False)
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: build == "mps")
        for version in ("cuda", "hip", "xpu"):
            monkeypatch.setattr(torch.version, version, "1.0" if version == build else None)
        device = torch.device(name) if build else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: device)

    return say


@pytest.mark.parametrize("name", DTYPES)
def test_the_supported_dtypes_begin_with_the_default_which_is_torchs(name, in_thread, answers):
    if name in ACCELERATORS:
        answers(name)
    backend = polycast.plugin.get_backend(name)
    assert tuple(backend.supported_dtypes()) == DTYPES[name]
    assert backend.default_dtype is in_thread(lambda: torch.get_autocast_dtype(name)) is DTYPES[name][0]
    supported = ", ".join(map(str, DTYPES[name]))
    for other in (torch.float32, torch.float64, torch.int8):
        assert backend.dtype_availability(other) == Availability(False, f"{name} supports {supported}")


def test_the_cpu_is_always_available():
    assert polycast.plugin.get_backend("cpu").availability() == Availability(True)
    assert polycast.backends()["cpu"].state == "ready"


@pytest.mark.parametrize(("name", "build"), [*((name, name) for name in WITHOUT), ("cuda", "hip")])
def test_a_device_is_available_if_it_is_visible(name, build, answers):
    backend = polycast.plugin.get_backend(name)
    answers(name, build=build)
    assert backend.availability() == Availability(False, f"no {name.upper()} device is visible")
    answers(name, build=build, available=True)
    assert backend.availability() == Availability(True)
    assert polycast.is_autocast_available(name) is True


@pytest.mark.parametrize(("name", "reason"), WITHOUT.items(), ids=WITHOUT)
def test_a_torch_without_the_device_is_the_reason(name, reason, answers):
    answers(name)
    assert polycast.plugin.get_backend(name).availability() == Availability(False, reason)
    assert polycast.is_autocast_available(name) is False
    status = polycast.backends()[name]
    assert (status.state, status.reason, status.default_dtype) == ("unavailable", reason, DTYPES[name][0])


@pytest.mark.parametrize(("newer", "dtypes"), [(True, DTYPES["mps"]), (False, (torch.float16,))])
def test_mps_has_bfloat16_from_macos_14_on(monkeypatch, answers, newer, dtypes):
    answers("mps", build="mps", available=True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: newer and version == (14, 0))
    backend = polycast.plugin.get_backend("mps")
    assert tuple(backend.supported_dtypes()) == dtypes
    assert backend.dtype_availability(torch.bfloat16) == (
        Availability(True) if newer else Availability(False, "bfloat16 needs macOS 14; mps supports torch.float16")
    )


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_gpu_supports_bfloat16_if_it_has_it(name, answers):
    backend = polycast.plugin.get_backend(name)
    answers(name, build=name, available=True, bfloat16=True)
    assert backend.dtype_availability(torch.bfloat16) == Availability(True)
    answers(name, build=name, available=True)
    assert tuple(backend.supported_dtypes()) == (torch.float16,)
    assert backend.dtype_availability(torch.float16) == Availability(True)
    reason = f"this GPU has no bfloat16; {name} supports torch.float16"
    assert backend.dtype_availability(torch.bfloat16) == Availability(False, reason)


@pytest.mark.parametrize(("initialized", "capturing"), [(False, True), (True, False), (True, True)])
def test_cuda_records_a_graph_only_once_it_is_initialized(monkeypatch, initialized, capturing):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: SimpleNamespace(is_capturing=lambda: capturing))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert polycast.plugin.get_backend("cuda").is_capturing() is (initialized and capturing)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "cuda"])
def test_the_others_record_no_graph(name):
    assert polycast.plugin.get_backend(name).is_capturing() is False


@pytest.mark.parametrize("name", ["cuda", "maia", "mtia", "xpu"])
def test_an_accelerator_bans_what_torch_does(name):
    backend = polycast.plugin.get_backend(name)
    banned = {op for op, policy in backend.policies.items() if policy is polycast.CastPolicy.BANNED}
    assert banned == {"aten::binary_cross_entropy"}
