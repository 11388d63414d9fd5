"""patch_torch: what torch's names mean while it is in force, and that they are torch's own after it."""

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
from polycast.drop_in import patch

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
TORCHS = torch.autocast


def names_now():
    return {(module, name): getattr(sys.modules[module], name) for module, name in THEIRS}


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


def test_it_replaces_every_public_name_and_gives_back_the_same_objects():
    with polycast.patch_torch():
        inside = names_now()
        left = public_names_of(THEIRS.values())
    assert [name for name, value in inside.items() if value is THEIRS[name]] == []
    assert left == set()
    assert {name for name, value in names_now().items() if value is not THEIRS[name]} == set()
    assert public_names_of(inside.values()) == set()


def test_the_names_that_the_tests_know_are_all_that_this_torch_has():
    functions = {"autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"}
    classes = {value for name, value in THEIRS.items() if name[1] == "autocast"}
    objects = classes | {getattr(autocast_mode, name) for name in functions}
    assert public_names_of(objects) == set(THEIRS)


def test_a_region_may_span_the_end_of_the_patch_and_its_beginning():
    patching = polycast.patch_torch()
    with TORCHS("cpu"):
        patching.start()
    ours = torch.autocast("cpu")
    with ours:
        patching.stop()
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_entered_twice_it_ends_with_the_outermost():
    one, other = polycast.patch_torch(), polycast.patch_torch()
    with one:
        inside = torch.autocast
        with one, other:
            assert torch.autocast is inside
        assert torch.autocast is inside
    assert torch.autocast is TORCHS


def test_two_may_end_in_the_order_in_which_they_began():
    one, other = polycast.patch_torch(), polycast.patch_torch()
    one.start()
    other.start()
    one.stop()
    assert torch.autocast is not TORCHS
    other.stop()
    assert torch.autocast is TORCHS


def test_it_ends_where_an_error_leaves_the_block():
    with pytest.raises(ZeroDivisionError), polycast.patch_torch():
        _ = 1 / 0
    assert names_now() == THEIRS
    assert torch.autocast is TORCHS


@pytest.mark.parametrize("elsewhere", [False, True])
def test_stop_without_start_is_refused(elsewhere):
    with polycast.patch_torch() if elsewhere else contextlib.nullcontext():
        before = torch.autocast
        with pytest.raises(RuntimeError) as caught:
            polycast.patch_torch().stop()
        assert torch.autocast is before
    assert str(caught.value) == (
        "patch_torch: stop() without start(): this object does not patch torch now. Call stop() on the object that "
        "start() was called on, once for each start()."
    )


def test_an_error_while_patching_leaves_nothing_patched(monkeypatch):
    class Sealed(ModuleType):
        def __setattr__(self, name, value):
            raise AttributeError(f"{name} is sealed")

    sealed = Sealed("torch.sealed")
    vars(sealed)["autocast"] = TORCHS
    monkeypatch.setitem(sys.modules, "torch.sealed", sealed)
    patching = polycast.patch_torch()
    with pytest.raises(AttributeError, match="autocast is sealed"):
        patching.start()
    assert {name for name, value in names_now().items() if value is not THEIRS[name]} == set()
    with pytest.raises(RuntimeError, match="without start"):
        patching.stop()
    monkeypatch.undo()
    with polycast.patch_torch():
        assert torch.autocast is not TORCHS


def test_an_alias_in_a_module_of_torchs_that_came_later_is_found(monkeypatch):
    later = ModuleType("torch.later")
    later.region = TORCHS
    monkeypatch.setitem(sys.modules, "torch.later", later)
    with polycast.patch_torch():
        assert later.region is torch.autocast
    assert later.region is TORCHS


def test_threads_may_patch_at_the_same_time():
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        seen = []
        for _ in range(50):
            with polycast.patch_torch():
                seen.append(torch.autocast is not TORCHS and isinstance(torch.autocast("cpu"), polycast.autocast))
        return all(seen)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    assert torch.autocast is TORCHS
    assert patch._patches == 0


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("device", ["cpu", "hpu"])
def test_a_region_can_be_copied_and_pickled(device):
    for region in (torch.autocast(device, torch.float16), torch.autocast(device, torch.float16, False)):
        for again in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
            assert type(again) is torch.autocast
            with again:
                assert torch.get_autocast_dtype(device) is torch.float16
                assert torch.is_autocast_enabled(device) is region._enabled
