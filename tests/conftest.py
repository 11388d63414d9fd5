"""Fixtures for all tests: engines, devices without hardware, and a check that each test cleans up."""

import contextlib
import copy
import gc
import logging
import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import setuptools  # noqa: F401  # before anybody imports distutils, which it replaces: torch's compiler needs it
import torch
from filelock import FileLock
from torch._subclasses import FakeTensorMode

import polycast
from polycast.engine import installation
from polycast.engine.recipes import plan
from polycast.region import resolve
from polycast.registry.registry import registry
from polycast.toolchain import load

from .collecting import pytest_addoption, pytest_collection, pytest_collection_modifyitems  # noqa: F401  # hooks
from .fixtures_of_processes import built, launch, run_program, start_launcher, switching_often  # noqa: F401

with contextlib.suppress(ModuleNotFoundError):  # the core is tested without plugins too
    from .fixtures_of_plugins import _no_profile, _own_profiles, profile_of  # noqa: F401

DEVICES = torch._C._autocast_supported_devices()

# Programs that tests start say nothing of the processor either; see filterwarnings in pyproject.toml.
os.environ.setdefault("PYTHONWARNINGS", "ignore:bfloat16 is slow on,ignore:float16 is slow on")
# Inductor starts no processes that compile, and does not try out the processor's instructions in each process.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.fixture(scope="module", autouse=True)
def _freeze():
    """Leave what is alive out of later garbage collections, which take long once a test has imported much."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    """Check after each test that no region is open and autocast is off; uninstall the kernels."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    left = [name for name in DEVICES if polycast.autocast_nesting(name) or torch.is_autocast_enabled(name)]
    for name in [name for name, loader in registry.loaders().items() if loader.by_hand is not None]:
        polycast.plugin.unregister_backend(name)
    polycast.uninstall()
    assert left == []
    assert torch.is_autocast_cache_enabled()


def use_engine(name, monkeypatch):
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", name)
    monkeypatch.setattr(load, "try_build", lambda _: None)  # runs the compiler, also where the engine is loaded
    yield name
    installation.forget_choice()


@pytest.fixture(name="engine", params=["native", "reference"])
def _engine(request, monkeypatch):
    """Run a test once on each engine."""
    yield from use_engine(request.param, monkeypatch)


@pytest.fixture
def native(monkeypatch):
    yield from use_engine("native", monkeypatch)


@pytest.fixture
def fake(monkeypatch):
    """Run a test under FakeTensorMode, where tensors of any device can be made, without the device."""
    for name in DEVICES:  # FakeTensorMode asks each device's module for these
        if not hasattr(torch, name):
            module = SimpleNamespace(is_initialized=lambda: False, is_available=lambda: False)
            monkeypatch.setattr(torch, name, module, raising=False)
    make_subclass = torch.Tensor._make_subclass

    def make_with_keys(cls, data, requires_grad=False, **settings):
        device = settings.get("device_for_backend_keys")
        if device is None or device.type != "maia":
            return make_subclass(cls, data, requires_grad, **settings)
        # This is how a fake tensor gets the keys of its device, and what torch reads them from
        # (c10::toBackendComponent) leaves maia out: it would have none, and pass by every kernel of the device.
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=data.device,
            requires_grad=requires_grad,
            dispatch_device=True,
            _extra_dispatch_keys=torch._C.DispatchKeySet(torch._C._parse_dispatch_key("AutocastMAIA")),
        )

    monkeypatch.setattr(torch.Tensor, "_make_subclass", staticmethod(make_with_keys))
    with FakeTensorMode() as mode:
        yield mode


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


class Logged(logging.Handler):
    """Keeps the records of the logger, by a handler of the test: pytest's is switched off."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        record.getMessage()  # raises if the arguments do not fit
        self.records.append(record)

    def take(self):
        """Return the level and the text of each record since the last call."""
        taken, self.records = self.records, []
        return [(each.levelname, each.getMessage()) for each in taken]


@pytest.fixture
def logged(monkeypatch):
    """Return a handler of all records of polycast's logger."""
    handler, logger = Logged(), logging.getLogger("polycast")
    monkeypatch.setattr(resolve, "_said", set())
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def in_thread():
    """Return a function that calls another in a fresh thread, and returns or raises what that does."""

    def call(function):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function).result()

    return call


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """Return a function that makes a folder by name and returns it: once for all processes of a parallel run."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def make_once(name, make):
        folder, made = root / name, root / f"{name}.made"
        with FileLock(root / f"{name}.lock"):
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                made.touch()
        return folder

    return make_once


@pytest.fixture(scope="session")
def start_chromium():
    """Return a function that starts a browser, which ends with the tests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there is no chromium and chromedriver here")
    started = []

    def start():
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for switch in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
        started.append(browser)
        browser.execute_cdp_cmd("Network.enable", {})
        return browser

    yield start
    for browser in started:
        browser.quit()


class HandMade(polycast.plugin.Backend):
    """A backend of the tests, registered by hand: always available, float16 by default."""

    default_dtype = torch.float16
    policies = polycast.plugin.STANDARD_POLICIES

    def __init__(self, device_type, **attributes):
        self.device_type = device_type
        vars(self).update(attributes)

    def supported_dtypes(self):
        return (torch.float16, torch.bfloat16)

    def availability(self):
        return polycast.plugin.Availability(True)


@pytest.fixture(autouse=True)
def _no_extensions_of_backends_by_hand(monkeypatch):
    """Leave out the extensions of a device while a test has a backend of its own for it."""
    register = registry.register

    def register_alone(backend):
        register(backend)
        monkeypatch.delitem(registry.discovery().extensions, backend.device_type, raising=False)

    monkeypatch.setattr(registry, "register", register_alone)


@pytest.fixture
def hand_made():
    """Return a function that registers a backend for a device and returns it."""

    def register(device_type, **attributes):
        backend = HandMade(device_type, **attributes)
        polycast.plugin.register_backend(backend)
        return backend

    return register


@pytest.fixture
def other_cpu():
    """Return a function that registers a copy of the CPU's backend with other attributes, and returns it."""

    def register(**attributes):
        backend = copy.copy(polycast.plugin.get_backend("cpu"))
        vars(backend).update(attributes)
        if registry.loaders()["cpu"].by_hand is not None:
            polycast.plugin.unregister_backend("cpu")
        polycast.plugin.register_backend(backend)
        return backend

    return register


class Int8Linear(polycast.plugin.LowBitKernel):
    """An int8 linear in Python, for the tests: a scale for each output feature, activations as they are."""

    weight = 1
    prepack_key = "rows"
    transposed = False

    def __init__(self):
        self.prepared = 0
        self.ran = 0

    def prepack(self, weight):
        self.prepared += 1
        rows = weight.float().t() if self.transposed else weight.float()
        if not bool(rows.isfinite().all()):
            return None
        scale = rows.abs().amax(1).clamp(min=1e-30) / 127
        return (rows / scale[:, None]).round().to(torch.int8), scale

    def unsupported_reason(self, *args):
        return "its features are odd in number" if args[self.weight].shape[1] % 2 else None

    def run(self, prepared, x, weight, bias=None):
        self.ran += 1
        integers, scale = prepared
        bias = None if bias is None else bias.float()
        result = torch.nn.functional.linear(x.float(), integers.float() * scale[:, None], bias)
        return result.to(torch.get_autocast_dtype(x.device.type))


class Int8Mm(Int8Linear):
    """The same for a second matrix of (K, N)."""

    prepack_key = "columns"
    transposed = True


@pytest.fixture
def int8_kernels(other_cpu):
    """Register a backend for the CPU with these kernels for Int8, and Rounded; return them by the name of the op."""
    kernels = {"aten::linear": Int8Linear(), "aten::mm": Int8Mm(), "aten::matmul": Int8Mm()}

    def recipe_availability(recipe):
        offered = recipe.kind.partition("-")[0] in ("int8", "rounded") and recipe.scales == "row"
        return polycast.plugin.Availability(offered, "" if offered else f"no kernels for {recipe.short} in these tests")

    other_cpu(recipe_availability=recipe_availability, low_bit_kernels=lambda recipe: kernels)
    yield kernels
    polycast.clear_autocast_cache()


class RecipeCalls(Counter):
    """Counts of the calls that recipes compute or decline."""

    def note(self, device_type, recipe, op, reason, package):
        self[device_type, recipe, op, reason or ""] += 1

    def records(self):
        """Return the counts, the largest first."""
        names = "device", "recipe", "op", "declined"
        return [SimpleNamespace(calls=calls, **dict(zip(names, key, strict=True))) for key, calls in self.most_common()]


@pytest.fixture
def recipe_counts():
    """Return a context manager that counts the ops that recipes compute or decline, on either engine."""

    @contextlib.contextmanager
    def count():
        counts = RecipeCalls()
        polycast.plugin.events.recipe_call.add(counts.note)
        try:
            yield counts
        finally:
            polycast.plugin.events.recipe_call.remove(counts.note)

    return count


@pytest.fixture
def asked(monkeypatch):
    """Return a list of the ops for which Python was asked to compute a call by a recipe."""
    asked, perform = [], plan.perform

    def note(op, *args):
        asked.append(op.removeprefix("aten::"))
        return perform(op, *args)

    monkeypatch.setattr(plan, "perform", note)
    return asked
