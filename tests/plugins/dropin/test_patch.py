"""patch_torch: which names of torch it replaces, and that it restores them."""

import contextlib
import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from torch.amp import autocast_mode

import polycast
from polycast_plugins.dropin import patch

THEIRS = {
    (module, name): getattr(sys.modules[module], name)
    for module, names in {
        "torch": ["autocast"],
        "torch.amp": ["autocast", "custom_bwd", "custom_fwd", "is_autocast_available"],
        "torch.amp.autocast_mode": [
            *["autocast", "autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"],
        ],
        "torch.cpu.amp": ["autocast"],
        "torch.cpu.amp.autocast_mode": ["autocast"],
        "torch.cuda.amp": ["autocast"],
        "torch.cuda.amp.autocast_mode": ["autocast"],
    }.items()
    for name in names
}
CLASSES = list({id(value): value for value in THEIRS.values() if isinstance(value, type)}.values())


def attributes_now():
    # Python adds these to a class when somebody reads its annotations, or pickles an instance.
    added = ("__annotations__", "__slotnames__")
    return {cls: {name: each for name, each in vars(cls).items() if name not in added} for cls in CLASSES}


ATTRIBUTES = attributes_now()


def names_now():
    return {(module, name): getattr(sys.modules[module], name) for module, name in THEIRS}


def is_patched():
    return isinstance(torch.autocast("cpu"), polycast.autocast)


def has_its_own():
    return (names_now(), attributes_now(), is_patched()) == (THEIRS, ATTRIBUTES, False)


@pytest.fixture(autouse=True)
def _torch_has_its_own_afterwards():
    yield
    assert has_its_own()


def public_names_of(objects):
    """Return module and name of everything public in torch that is one of the objects."""
    identities = set(map(id, objects))
    return {
        (module_name, name)
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and f"{module_name}.".startswith("torch.") and "._" not in module_name
        for name, value in list(vars(module).items())
        if id(value) in identities
    }


@pytest.mark.slow
def test_the_classes_stay_and_every_public_name_of_a_function_is_replaced():
    with polycast.patch_torch():
        inside = names_now()
        left = public_names_of(value for value in THEIRS.values() if value not in CLASSES)
    assert {value for name, value in inside.items() if value is THEIRS[name]} == set(CLASSES)
    assert left == set()
    assert has_its_own()
    assert public_names_of(value for value in inside.values() if value not in CLASSES) == set()


def test_the_tests_cover_every_name_of_this_torch():
    functions = {"autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"}
    assert public_names_of([*CLASSES, *(getattr(autocast_mode, name) for name in functions)]) == set(THEIRS)


def test_a_region_may_span_the_end_of_the_patch_and_its_beginning():
    patching = polycast.patch_torch()
    with torch.autocast("cpu"):
        patching.start()
    ours = torch.autocast("cpu")
    with ours:
        patching.stop()
        assert torch.is_autocast_enabled("cpu")


def test_a_patch_entered_twice_ends_with_the_outermost_exit():
    one, other = polycast.patch_torch(), polycast.patch_torch()
    with one:
        inside = torch.amp.custom_fwd
        with one, other:
            assert torch.amp.custom_fwd is inside
            assert is_patched()
        assert torch.amp.custom_fwd is inside
        assert is_patched()


def test_two_patches_may_end_in_the_order_in_which_they_began():
    one, other = polycast.patch_torch(), polycast.patch_torch()
    one.start()
    other.start()
    one.stop()
    assert is_patched()
    other.stop()


def test_the_patch_outlives_uninstall():
    with polycast.patch_torch():
        polycast.uninstall()
        with torch.autocast("cpu"):
            assert polycast.autocast_nesting("cpu") == 1


def test_an_error_in_the_block_ends_the_patch():
    with pytest.raises(ZeroDivisionError), polycast.patch_torch():
        _ = 1 / 0


@pytest.mark.parametrize("elsewhere", [False, True])
def test_stop_without_start_is_refused(elsewhere):
    with polycast.patch_torch() if elsewhere else contextlib.nullcontext():
        with pytest.raises(RuntimeError) as caught:
            polycast.patch_torch().stop()
        assert is_patched() is elsewhere
    assert str(caught.value) == (
        "patch_torch: stop() without start(): this object does not patch torch now. Call stop() on the object that "
        "start() was called on, once for each start()."
    )


def test_an_error_while_patching_undoes_the_patch(monkeypatch):
    class Sealed(ModuleType):
        def __setattr__(self, name, value):
            raise AttributeError(f"{name} is sealed")

    sealed = Sealed("torch.sealed")
    vars(sealed)["custom_fwd"] = torch.amp.custom_fwd
    monkeypatch.setitem(sys.modules, "torch.sealed", sealed)
    patching = polycast.patch_torch()
    with pytest.raises(AttributeError, match="custom_fwd is sealed"):
        patching.start()
    assert has_its_own()
    with pytest.raises(RuntimeError, match="without start"):
        patching.stop()
    monkeypatch.undo()
    with polycast.patch_torch():
        assert is_patched()


def test_an_alias_in_a_torch_module_that_is_imported_later_is_found(monkeypatch):
    later = ModuleType("torch.later")
    later.region, later.forward = torch.autocast, torch.amp.custom_fwd
    monkeypatch.setitem(sys.modules, "torch.later", later)
    with polycast.patch_torch():
        assert (later.region, later.forward) == (torch.autocast, torch.amp.custom_fwd)
    assert (later.region, later.forward) == (torch.autocast, torch.amp.custom_fwd)


@pytest.mark.slow
def test_threads_may_patch_at_the_same_time():
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        seen = []
        for _ in range(50):
            with polycast.patch_torch():
                seen.append(is_patched())
        return all(seen)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    assert patch._patches == 0


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("device", ["cpu", "hpu"])
def test_a_region_can_be_copied_and_pickled(device):
    for region in (torch.autocast(device, torch.float16), torch.autocast(device, torch.float16, False)):
        for again in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
            assert type(again) is type(region)
            with again:
                assert torch.get_autocast_dtype(device) is torch.float16
                assert torch.is_autocast_enabled(device) is region._enabled


def test_a_region_that_was_pickled_while_patched_is_torchs_where_torch_is_not():
    with polycast.patch_torch():
        pickled = pickle.dumps(torch.autocast("cpu", torch.float16, cache_enabled=False))
    region = pickle.loads(pickled)
    assert type(region) is torch.autocast
    assert (region.fast_dtype, region._enabled, region._cache_enabled) == (torch.float16, True, False)


def test_a_later_patch_of_another_library_stays_and_makes_torchs_regions_again():
    torchs, made = torch.autocast.__init__, []
    with polycast.patch_torch():
        ours = torch.autocast.__init__

        def theirs(self, *args, **kwargs):
            made.append(args)
            ours(self, *args, **kwargs)

        torch.autocast.__init__ = theirs
    try:
        assert torch.autocast.__init__ is theirs
        assert type(torch.autocast("cpu")) is torch.autocast
        with polycast.patch_torch():
            assert isinstance(torch.autocast("cpu"), polycast.autocast)
        assert made == [("cpu",)]
    finally:
        torch.autocast.__init__ = torchs
