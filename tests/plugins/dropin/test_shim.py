"""The regions and functions that replace torch's while it is patched, and the lines of their warnings."""

import contextlib
import copy
import inspect
import pickle
import re
import warnings

import pytest
import torch
from torch.amp import autocast_mode

import polycast
from polycast.engine import installation
from polycast.policy import manifests
from polycast.region import slow_dtype
from polycast.registry.registry import registry

pytestmark = pytest.mark.usefixtures("patched")
X = torch.ones(2, 2)


@pytest.mark.usefixtures("engine")
def test_a_region_is_polycasts():
    region = torch.autocast("cpu")
    assert isinstance(region, polycast.autocast)
    with region as entered:
        assert entered is region
        assert polycast.autocast_nesting("cpu") == 1
        assert torch.cat([torch.ones(1).half(), torch.ones(1).bfloat16()]).dtype is torch.float32  # torch's raises
        assert (X @ X).dtype is torch.bfloat16


def test_a_region_takes_torchs_arguments_in_torchs_order():
    assert [*inspect.signature(torch.autocast).parameters] == ["device_type", "dtype", "enabled", "cache_enabled"]
    with torch.autocast("cpu", torch.float16, False, False):
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()


@pytest.mark.usefixtures("engine")
def test_a_region_decorates_functions_as_polycasts_does():
    @torch.autocast("cpu")
    def products(x):
        yield x @ x

    assert next(products(X)).dtype is torch.bfloat16

    decorated = torch.amp.autocast_mode.autocast_decorator(torch.autocast("cpu"), lambda x: x @ x)
    assert decorated(X).dtype is torch.bfloat16


@pytest.mark.usefixtures("engine")
def test_a_region_nested_in_itself_is_left():
    region = torch.autocast("cpu")
    with region, region:
        pass
    assert not torch.is_autocast_enabled("cpu")


def test_a_region_that_was_not_entered_cannot_be_left():
    with pytest.raises(RuntimeError, match=r"^autocast\('cpu', .+ cannot be left on thread"):
        torch.autocast("cpu").__exit__(None, None, None)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [((3,), ValueError), (("not a real device",), RuntimeError), (("cpu", "bfloat16"), TypeError), ((), TypeError)],
)
def test_bad_arguments_are_refused(arguments, kind):
    with pytest.raises(kind):
        torch.autocast(*arguments)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("module", [torch.amp, torch.cuda.amp])
def test_custom_fwd_and_custom_bwd_are_polycasts(module):
    device = {"device_type": "cpu"} if module is torch.amp else {}
    warns = pytest.warns(FutureWarning) if module is torch.cuda.amp else contextlib.nullcontext()
    with warns:

        class Square(torch.autograd.Function):
            @staticmethod
            @module.custom_fwd(**device) if device else module.custom_fwd
            def forward(x):
                return x * x

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(*inputs)

            @staticmethod
            @module.custom_bwd(**device) if device else module.custom_bwd
            def backward(ctx, grad):
                return 2 * ctx.saved_tensors[0] * grad

    x = torch.full((1,), 3.0, requires_grad=True)
    Square.apply(x).backward()  # torch's own raise AttributeError with setup_context
    assert x.grad.item() == 6.0


def test_is_autocast_available_returns_whether_the_device_can_be_used(hand_made):
    hand_made("maia", availability=lambda: polycast.plugin.Availability(False, "it is not plugged in"))
    assert torch.amp.is_autocast_available("maia") is False
    assert torch.amp.is_autocast_available("cpu") is True
    assert torch.amp.is_autocast_available("hpu") is torch._C._is_autocast_available("hpu")
    assert torch.amp.is_autocast_available("meta") is False


def test_a_region_for_a_device_without_a_backend_is_torchs():
    region = torch.autocast("hpu", torch.bfloat16)
    assert isinstance(region, torch.autocast)
    with region:
        assert torch.is_autocast_enabled("hpu")
        assert torch.get_autocast_dtype("hpu") is torch.bfloat16
        assert polycast.autocast_nesting("hpu") == 0
    assert not torch.is_autocast_enabled("hpu")
    assert region(lambda: torch.is_autocast_enabled("hpu"))() is True
    assert "autocast object" in repr(region)


def test_a_device_without_autocast_raises_torchs_error(patched):
    with pytest.raises(RuntimeError) as ours:
        torch.autocast("meta", torch.bfloat16)
    patched.stop()
    try:
        with pytest.raises(RuntimeError, match=re.escape(str(ours.value))):
            torch.autocast("meta", torch.bfloat16)
    finally:
        patched.start()


def test_custom_fwd_for_a_device_without_a_backend_is_torchs():
    decorated = torch.amp.custom_fwd(lambda ctx: None, device_type="hpu")
    assert decorated.__code__.co_filename == autocast_mode.__file__


def test_a_blocked_device_is_torchs(monkeypatch):
    monkeypatch.setenv("POLYCAST_BLOCK", "xpu")
    monkeypatch.setattr(registry, "_discovered", None)
    monkeypatch.setattr(registry, "ready", {})
    with torch.autocast("xpu", enabled=False):
        assert polycast.autocast_nesting("xpu") == 0


def test_a_broken_backend_raises_an_error(monkeypatch):
    def broken(self):
        raise polycast.errors.BackendBrokenError("the plugin is broken")

    monkeypatch.setattr("polycast.registry.backend_loader.BackendLoader.get", broken)
    monkeypatch.setattr(registry, "_discovered", None)
    monkeypatch.setattr(registry, "ready", {})
    with pytest.raises(polycast.errors.BackendBrokenError, match="the plugin is broken"):
        torch.autocast("cpu")


def test_attributes_that_a_subclass_sets_apply(engine, patched):
    class Half(torch.autocast):
        def __init__(self):
            super().__init__("cpu")
            self.fast_dtype = torch.float16

    patched.stop()
    before = Half()
    patched.start()
    region = Half()
    for each in (before, region):
        with each:
            assert (X @ X).dtype is torch.float16
    assert region(lambda: X @ X)().dtype is torch.float16
    region.fast_dtype = torch.bfloat16
    with region:
        assert (X @ X).dtype is torch.bfloat16


def test_a_region_of_patched_torch_can_be_set(engine):
    region = torch.autocast("cpu")
    region.fast_dtype = torch.float16
    with region:
        assert (X @ X).dtype is torch.float16


def test_copies_have_the_attributes_of_a_program(engine):
    region = torch.autocast("cpu")
    region.note = ["of the program"]
    for copied in (copy.copy(region), copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        assert vars(copied).keys() == vars(region).keys()
        assert copied.note == region.note
    assert copy.deepcopy(region).note is not region.note


@pytest.fixture
def emulated(hand_made, monkeypatch):
    """Serve cpu by a backend that emulates bfloat16; forget which dtypes regions have had in this process."""
    monkeypatch.setattr(slow_dtype, "_checked", set())
    monkeypatch.setattr(manifests, "functions", lambda table: [])
    hand_made("cpu", default_dtype=torch.bfloat16, slow_reason=lambda dtype: "it has no such unit")
    polycast.plugin.refresh("cpu")
    yield
    polycast.plugin.refresh("cpu")


def test_a_region_with_a_slow_dtype_warns_at_the_line_of_the_program(emulated):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.autocast("cpu")
        torch.autocast("cpu", cache_enabled=False)
    (found,) = [each for each in caught if each.category is polycast.errors.SlowDtypeWarning]
    assert found.filename == __file__


def test_the_warning_of_the_reference_engine_names_the_users_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("POLYCAST_ENGINE", "auto")
    installation.forget_choice()

    def enter():
        with torch.autocast("cpu"):
            pass

    with pytest.warns(UserWarning, match="^Regions run on polycast's reference engine") as caught:
        enter()
    installation.forget_choice()
    first, last = enter.__code__.co_firstlineno, max(line for *_, line in enter.__code__.co_lines() if line)
    assert caught[0].filename == __file__
    assert first < caught[0].lineno <= last
