"""The registry: device strings, look-ups, registration by hand, status and availability."""

import copy
import importlib.metadata
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polycast
from polycast.engine import installation
from polycast.registry.registry import registry

BUILT_INS = sorted(
    importlib.metadata.distribution("polycast").entry_points.select(group="polycast.backends").names - {"generic"}
)
BY_NAME = ("get_backend", "autocast", "install", "uninstall", "unregister_backend", "is_autocast_available", "refresh")


def of_name(function):
    return getattr(polycast, function, None) or getattr(polycast.plugin, function)


def device_types():
    """Return the device types of the running torch, which lists them in an error."""
    with pytest.raises(RuntimeError) as refusal:
        torch.device("another")
    return re.search(r"Expected one of (.*) device type", str(refusal.value))[1].split(", ")


DEVICE_TYPES = device_types()


def has_kernel(key, op="aten::mm"):
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def missing(device_type):
    return (
        f"No polycast backend is installed for {device_type!r}. Backends are installed for: "
        f"{', '.join(BUILT_INS)}. Install a distribution that supplies one in the entry-point group "
        "'polycast.backends', or pass yours to polycast.plugin.register_backend()."
    )


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    monkeypatch.setenv("POLYCAST_ENGINE", "reference")
    yield
    installation.forget_choice()


@pytest.mark.parametrize("function", BY_NAME)
def test_a_device_that_is_not_a_str_is_refused(function, subtests):
    for value in [torch.device("cpu"), 0, b"cpu"]:
        with subtests.test(value=value):
            text = f"Expected `device_type` of type `str`, got: `{type(value)}`"
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                of_name(function)(value)


@pytest.mark.parametrize("function", BY_NAME)
def test_a_string_that_torch_does_not_know_is_refused(function, subtests):
    for name in ["not a real device", "", "CPU", " cpu", "cuda:-1", "cuda:x", "cpu:0:1", "cpu\0"]:
        with subtests.test(name=name):
            with pytest.raises(RuntimeError, match=f"^{re.escape(f'Invalid device string: {name!r}. ')}") as refusal:
                of_name(function)(name)
            assert refusal.type is RuntimeError


@given(text=st.one_of(st.text(), st.builds(":".join, st.lists(st.sampled_from([*DEVICE_TYPES, "0", "1", "00", "-1"])))))
@pytest.mark.filterwarnings("ignore:'mkldnn' is no longer used as device type")
def test_a_string_is_accepted_if_torch_accepts_it(text):
    try:
        known = torch.device(text).type in DEVICE_TYPES
    except (RuntimeError, IndexError):
        with pytest.raises(RuntimeError, match=f"^{re.escape(f'Invalid device string: {text!r}.')}"):
            polycast.is_autocast_available(text)
    else:
        assert known
        assert polycast.is_autocast_available(text) in (True, False)


@pytest.mark.parametrize(
    ("name", "nearest"), [("CPU", "cpu"), ("cudda", "cuda"), ("Cuda:0", "cuda"), ("not a real device", None)]
)
def test_the_error_for_an_unknown_string_says_what_is_there(name, nearest):
    with pytest.raises(RuntimeError) as refusal:
        polycast.plugin.get_backend(name)
    installed = ", ".join(sorted(registry.loaders()))
    did_you_mean = "" if nearest is None else f" Did you mean {nearest!r}?"
    assert str(refusal.value) == (
        f"Invalid device string: {name!r}.{did_you_mean} Backends are installed for: {installed}. The "
        "plugin of another device has an entry point of the device's name in the group 'polycast.backends'."
    )


@pytest.mark.parametrize(
    ("accelerator", "hint"),
    [(torch.device("cuda"), "Did you mean 'cuda'?"), (None, "This torch was built without GPUs.")],
    ids=str,
)
def test_the_error_for_a_gpu_names_the_kind_that_torch_was_built_for(accelerator, hint, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    text = rf"^Invalid device string: 'gpu'\. {re.escape(hint)} Backends are installed"
    with pytest.raises(RuntimeError, match=text):
        polycast.autocast("gpu")


@pytest.mark.parametrize("index", ["", ":0", ":1", ":127"])
@pytest.mark.filterwarnings("ignore:'mkldnn' is no longer used as device type")
def test_availability_is_a_bool_for_every_device_of_torch(index, subtests):
    for name in DEVICE_TYPES:
        with subtests.test(name=name):
            assert type(polycast.is_autocast_available(name + index)) is bool


@pytest.mark.parametrize("name", BUILT_INS)
def test_an_index_means_the_device_type(name):
    assert polycast.plugin.get_backend(f"{name}:0") is polycast.plugin.get_backend(name)


@pytest.mark.parametrize("function", ["get_backend", "autocast", "install", "get_autocast_dtype"])
def test_the_error_for_a_device_without_a_backend_lists_those_with_one(function):
    with pytest.raises(polycast.errors.BackendNotFoundError, match=f"^{re.escape(missing('ipu'))}$"):
        of_name(function)("ipu")


def test_the_error_lists_devices_registered_by_hand(hand_made):
    hand_made("hpu")
    with pytest.raises(polycast.errors.BackendNotFoundError, match=", ".join(sorted([*BUILT_INS, "hpu"]))):
        polycast.plugin.get_backend("meta")


def test_each_error_is_a_standard_one():
    errors = polycast.errors
    for each in (errors.BackendNotFoundError, errors.BackendBrokenError, errors.BackendConflictError):
        assert issubclass(each, RuntimeError)
    assert issubclass(errors.InvalidBackendError, ValueError)
    assert issubclass(errors.AutocastDisabledWarning, UserWarning)


@pytest.mark.parametrize("name", BUILT_INS)
def test_the_status_of_a_built_in_names_this_distribution(name):
    status = polycast.backends()[name]
    found = status.device_type, status.distribution, status.version, status.replaces
    assert found == (name, "polycast", importlib.metadata.version("polycast"), ())
    assert status.default_dtype is polycast.plugin.get_backend(name).default_dtype
    assert (status.state == "ready") == polycast.is_autocast_available(name) == (status.reason == "")


def test_the_statuses_are_sorted_read_only_and_kept_once_read(hand_made):
    before = polycast.backends()
    assert before["hpu"].state == "missing"
    hand_made("hpu")
    assert list(polycast.backends()) == list(before) == sorted(before)
    assert (before["hpu"].state, polycast.backends()["hpu"].state) == ("missing", "ready")
    with pytest.raises(TypeError, match="does not support item assignment"):
        before["hpu"] = None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda statuses: pickle.loads(pickle.dumps(statuses))])
def test_statuses_can_be_copied_and_pickled(copied):
    statuses = polycast.backends()
    assert copied(statuses) == statuses
    assert repr(copied(statuses)) == repr(statuses)


def test_a_backend_registered_by_hand_takes_precedence_over_entry_points(hand_made):
    found = polycast.plugin.get_backend("cpu")
    backend = hand_made("cpu")
    status = polycast.backends()["cpu"]
    assert polycast.plugin.get_backend("cpu") is backend
    assert (status.state, status.distribution, status.version) == ("ready", "", "")
    assert status.replaces == (f"polycast {importlib.metadata.version('polycast')} (polycast_backends.cpu)",)
    polycast.plugin.unregister_backend("cpu:0")
    assert polycast.plugin.get_backend("cpu") is found


def test_a_device_without_entry_points_is_available_and_has_kernels_while_a_backend_is_registered(hand_made):
    hand_made("hpu")
    assert polycast.is_autocast_available("hpu")
    polycast.install("hpu")
    assert has_kernel("AutocastHPU")
    polycast.plugin.unregister_backend("hpu")
    assert not has_kernel("AutocastHPU")
    assert not polycast.is_autocast_available("hpu")
    assert polycast.backends()["hpu"].state == "missing"
    with pytest.raises(RuntimeError, match=r"^Invalid device string: 'hpu:'\. "):
        polycast.is_autocast_available("hpu:")


def test_every_device_that_torch_has_an_autocast_key_for_has_a_status():
    without = set(torch._C._autocast_supported_devices()) - {*BUILT_INS}
    statuses = {name: status for name, status in polycast.backends().items() if name not in BUILT_INS}
    assert {"hpu", "ipu", "xla"} <= without
    text = "A plugin is needed: no distribution has an entry point {!r} in the group 'polycast.backends'."
    assert statuses == {name: polycast.BackendStatus(name, "missing", text.format(name)) for name in without}


def test_a_second_backend_registered_by_hand_is_refused(hand_made):
    first = hand_made("hpu")
    remedy = "Call polycast.plugin.unregister_backend('hpu') first."
    text = f"A backend for 'hpu' is already registered by hand: {first!r}. {remedy}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        hand_made("hpu")
    assert polycast.plugin.get_backend("hpu") is first


@pytest.mark.parametrize("name", ["cpu", "ipu"])
def test_only_backends_registered_by_hand_can_be_unregistered(name):
    text = f"No backend for {name!r} is registered by hand. One found through an entry point is switched off with "
    with pytest.raises(polycast.errors.BackendNotFoundError, match=f"^{re.escape(text)}POLYCAST_BLOCK={name}\\.$"):
        polycast.plugin.unregister_backend(name)


def test_rejecting_a_backend_changes_nothing(hand_made):
    polycast.install("cpu")
    before, backend = polycast.backends(), polycast.plugin.get_backend("cpu")
    text = r"default_dtype must be a floating-point torch\.dtype"
    for device_type in ("cpu", "hpu"):
        with pytest.raises(polycast.errors.InvalidBackendError, match=text):
            hand_made(device_type, default_dtype=torch.int8)
    assert polycast.backends() == before
    assert polycast.plugin.get_backend("cpu") is backend
    assert has_kernel("AutocastCPU")
    assert not has_kernel("AutocastHPU")


def raising(error):
    def availability():
        raise error

    return availability


NO_ANSWER = "availability() returned {!r}, expected a polycast.plugin.Availability"
CHECKS = {
    "says no": (lambda: polycast.plugin.Availability(False, "no device"), "no device"),
    "raises": (raising(RuntimeError("driver 12 is too old")), "driver 12 is too old"),
    "exits": (raising(SystemExit("no board")), "no board"),
    "raises without a text": (raising(OSError()), "OSError"),
    "returns a bool": (lambda: True, NO_ANSWER.format(True)),
    "returns nothing": (lambda: None, NO_ANSWER.format(None)),
}


@pytest.mark.parametrize(("check", "reason"), CHECKS.values(), ids=CHECKS)
def test_an_unavailable_device_has_the_reason_in_its_status_and_its_regions_warn_and_are_disabled(
    hand_made, check, reason
):
    backend = hand_made("hpu", availability=check)
    status = polycast.backends()["hpu"]
    assert (status.state, status.reason, status.default_dtype) == ("unavailable", reason, torch.float16)
    assert polycast.is_autocast_available("hpu") is False
    assert polycast.plugin.get_backend("hpu") is backend
    text = f"hpu is not available: {reason}. Disabling autocast."
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match=f"^{re.escape(text)}$"):
        region = polycast.autocast("hpu")
    with region:
        assert not polycast.is_autocast_enabled("hpu")


def test_a_warning_that_a_filter_makes_an_error_is_the_reason_in_a_status_and_raised_by_regions(hand_made):
    hand_made("hpu", availability=raising(DeprecationWarning("old driver")))
    status = polycast.backends()["hpu"]
    assert (status.state, status.reason) == ("unavailable", "old driver")
    assert "old driver" in repr(polycast.backends())
    with pytest.raises(DeprecationWarning, match="old driver"):
        polycast.autocast("hpu")
