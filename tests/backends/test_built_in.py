"""The built-in backends: their dtypes, and the reason that each gives if its device is absent."""

import re
from types import SimpleNamespace

import pytest
import torch

import polycast
from polycast.plugin import Availability

ACCELERATORS = ("cuda", "xpu")
OTHERS = ("maia", "mps", "mtia")
DTYPES = {
    "cpu": (torch.bfloat16, torch.float16),
    "cuda": (torch.float16, torch.bfloat16),
    "maia": (torch.bfloat16, torch.float16),
    "mps": (torch.float16, torch.bfloat16),
    "mtia": (torch.float16, torch.bfloat16),
    "xpu": (torch.float16, torch.bfloat16),
}


@pytest.fixture(params=ACCELERATORS)
def accelerator(request):
    return request.param


@pytest.fixture
def absent(monkeypatch, accelerator):
    """The accelerator, of which none is there."""
    monkeypatch.setattr(getattr(torch, accelerator), "is_available", lambda: False)
    return accelerator


@pytest.fixture
def without_bfloat16(monkeypatch, accelerator):
    """The accelerator, of which there is one that has no bfloat16."""
    monkeypatch.setattr(getattr(torch, accelerator), "is_available", lambda: True)
    monkeypatch.setattr(getattr(torch, accelerator), "is_bf16_supported", lambda: False)
    return accelerator


def built_with(monkeypatch, *, cuda=None, hip=None, xpu=None):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "xpu", xpu)


@pytest.mark.parametrize("name", DTYPES)
def test_the_supported_dtypes_begin_with_the_default_which_is_torchs(name, in_thread, monkeypatch):
    if name in ACCELERATORS:
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    backend = polycast.plugin.get_backend(name)
    assert tuple(backend.supported_dtypes()) == DTYPES[name]
    assert backend.default_dtype is in_thread(lambda: torch.get_autocast_dtype(name)) is DTYPES[name][0]
    supported = ", ".join(map(str, DTYPES[name]))
    for other in (torch.float32, torch.float64, torch.int8):
        assert backend.dtype_availability(other) == Availability(False, f"{name} supports {supported}")


def test_the_cpu_is_always_available():
    assert polycast.plugin.get_backend("cpu").availability() == Availability(True)
    assert polycast.backends()["cpu"].state == "ready"


def test_an_accelerator_that_is_there_is_available_with_bfloat16_if_it_can_have_it(monkeypatch, accelerator):
    monkeypatch.setattr(getattr(torch, accelerator), "is_available", lambda: True)
    monkeypatch.setattr(getattr(torch, accelerator), "is_bf16_supported", lambda: True)
    assert polycast.plugin.get_backend(accelerator).dtype_availability(torch.bfloat16) == Availability(True)
    assert polycast.plugin.get_backend(accelerator).availability() == Availability(True)
    assert polycast.is_autocast_available(accelerator) is True


def test_a_torch_that_was_built_without_the_accelerator_is_the_reason_and_regions_are_disabled(monkeypatch, absent):
    built_with(monkeypatch)
    reason = f"torch {torch.__version__} was built without {absent.upper()}"
    assert polycast.plugin.get_backend(absent).availability() == Availability(False, reason)
    assert polycast.is_autocast_available(absent) is False
    status = polycast.backends()[absent]
    assert (status.state, status.reason, status.default_dtype) == ("unavailable", reason, DTYPES[absent][0])
    text = re.escape(f"{absent} is not available: {reason}. Disabling autocast.")
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match=f"^{text}$"):
        region = polycast.autocast(absent)
    with region:
        assert polycast.is_autocast_enabled(absent) is False


@pytest.mark.parametrize(
    ("name", "build"), [("cuda", {"cuda": "13.0"}), ("cuda", {"hip": "7.0"}), ("xpu", {"xpu": "20250101"})]
)
def test_a_device_that_is_not_visible_is_the_reason(monkeypatch, name, build):
    monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    built_with(monkeypatch, **build)
    assert polycast.plugin.get_backend(name).availability() == Availability(
        False, f"no {name.upper()} device is visible"
    )


@pytest.fixture
def answers(monkeypatch):
    """Return a function that has torch say of a device whether it was built for it and whether one is there."""

    def say(name, *, built, available):
        module = torch.backends.mps if name == "mps" else getattr(torch, name, SimpleNamespace())
        monkeypatch.setattr(torch, "maia", module if name == "maia" and built else None, raising=False)
        monkeypatch.setattr(module, "is_available", lambda: available, raising=False)
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
        device = torch.device(name) if built else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: device)

    return say


@pytest.mark.parametrize("name", OTHERS)
def test_one_of_the_other_devices_is_available_if_it_is_there_and_else_not_visible(name, answers):
    backend = polycast.plugin.get_backend(name)
    answers(name, built=True, available=False)
    assert backend.availability() == Availability(False, f"no {name.upper()} device is visible")
    answers(name, built=True, available=True)
    assert backend.availability() == Availability(True)
    assert polycast.is_autocast_available(name) is True


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("maia", "torch.maia is missing: import the package of the Maia driver first"),
        ("mps", f"torch {torch.__version__} was built without MPS"),
        ("mtia", f"torch {torch.__version__} was built without MTIA"),
    ],
)
def test_a_torch_without_one_of_the_other_devices_is_the_reason(name, reason, answers):
    answers(name, built=False, available=False)
    assert polycast.plugin.get_backend(name).availability() == Availability(False, reason)
    assert (polycast.backends()[name].state, polycast.backends()[name].reason) == ("unavailable", reason)
    with pytest.warns(
        polycast.errors.AutocastDisabledWarning, match=f"^{name} is not available: {re.escape(reason)}\\."
    ):
        polycast.autocast(name)


@pytest.mark.parametrize(("newer", "dtypes"), [(True, DTYPES["mps"]), (False, (torch.float16,))])
def test_mps_has_bfloat16_from_macos_14_on(monkeypatch, answers, newer, dtypes):
    answers("mps", built=True, available=True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: newer and version == (14, 0))
    backend = polycast.plugin.get_backend("mps")
    assert tuple(backend.supported_dtypes()) == dtypes
    assert backend.dtype_availability(torch.bfloat16) == (
        Availability(True) if newer else Availability(False, "bfloat16 needs macOS 14; mps supports torch.float16")
    )


def test_a_gpu_without_bfloat16_supports_float16_alone_and_a_region_with_it_is_disabled(without_bfloat16):
    name = without_bfloat16
    backend = polycast.plugin.get_backend(name)
    assert tuple(backend.supported_dtypes()) == (torch.float16,)
    assert backend.dtype_availability(torch.float16) == Availability(True)
    text = (
        f"In {name.upper()} autocast, but the target dtype is not supported. Disabling autocast.\n"
        f"torch.bfloat16 was asked for: this GPU has no bfloat16; {name} supports torch.float16."
    )
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match=f"^{re.escape(text)}$"):
        polycast.autocast(name, torch.bfloat16)


@pytest.mark.parametrize(("initialized", "capturing"), [(False, True), (True, False), (True, True)])
def test_cuda_records_a_graph_only_once_it_is_initialized(monkeypatch, initialized, capturing):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: SimpleNamespace(is_capturing=lambda: capturing))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert polycast.plugin.get_backend("cuda").is_capturing() is (initialized and capturing)


@pytest.mark.parametrize("name", ["cpu", "xpu", *OTHERS])
def test_the_others_record_no_graph(name):
    assert polycast.plugin.get_backend(name).is_capturing() is False


@pytest.mark.parametrize("name", ["cuda", "maia", "mtia", "xpu"])
def test_an_accelerator_bans_what_torch_does(name):
    backend = polycast.plugin.get_backend(name)
    banned = {op for op, policy in backend.policies.items() if policy is polycast.CastPolicy.BANNED}
    assert banned == {"aten::binary_cross_entropy"}
