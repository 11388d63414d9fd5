"""The settings that regions get for equal arguments: kept, and resolved again once what they depend on changes.

Each region is made several times, since the native engine keeps the settings of the first.
"""

import functools
import gc
import inspect
import os
import sys
import typing
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import polycast
from polycast import autocast
from polycast.engine.kernels import installed

from .made_region import made

pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16, "enabled": False},
        {"cache_enabled": False},
        {"cache_enabled": True, "enabled": 1},
        {"recipe": "none"},
    ],
    ids=str,
)
def test_later_regions_equal_the_first(arguments):
    first, last = autocast("cpu", **arguments), made("cpu", **arguments)
    assert (first._settings, first.device, first.fast_dtype) == (last._settings, last.device, last.fast_dtype)
    assert type(last._settings) is type(first._settings)
    assert repr(last) == repr(first)


def test_they_are_found_by_value_of_strings(int8_kernels, engine):
    with autocast("cpu"):  # which chooses the engine
        pass
    settings = made("cpu", recipe="rounded")._settings
    again = made("".join(["c", "pu"]), recipe="".join(["round", "ed"]))._settings
    assert again == settings
    assert (again is settings) is (engine == "native")
    assert made("cpu:0", recipe="rounded")._settings == settings


def test_arguments_by_position_and_by_name_mean_the_same():
    by_position = made("cpu", torch.float16, False, True)._settings
    assert made(cache_enabled=True, enabled=False, dtype=torch.float16, device_type="cpu")._settings == by_position


BAD = [
    ((), {}, "missing 1 required positional argument: 'device_type'"),
    ((), {"dtype": None}, "missing 1 required positional argument: 'device_type'"),
    (("cpu", None, True, None, None), {}, "takes from 2 to 5 positional arguments but 6 were given"),
    (("cpu",), {"device_type": "cpu"}, "got multiple values for argument 'device_type'"),
    (("cpu",), {"recpie": "int8"}, "got an unexpected keyword argument 'recpie'"),
    (("cpu",), {"cache_enabled": 0}, "cache_enabled must be a bool or None, got 0"),
    (("cpu",), {"cache": 3}, "cache must be a polycast.WeightCache or None, got 3"),
]


def test_bad_arguments_are_refused_each_time(subtests):
    for args, named, message in BAD:
        made("cpu")
        for _ in range(2):
            with subtests.test(message=message), pytest.raises(TypeError, match=message):
                autocast(*args, **named)
    with pytest.raises(ValueError, match="leave out one of the two"):
        made("cpu", cache=polycast.WeightCache(), cache_enabled=False)


def test_a_region_without_dtype_takes_the_threads(in_thread):
    def dtype():
        return made("cpu").fast_dtype

    assert dtype() is torch.bfloat16
    with autocast("cpu", torch.float16):
        assert dtype() is torch.float16
        assert made("cpu", torch.bfloat16).fast_dtype is torch.bfloat16
        assert in_thread(dtype) is torch.bfloat16
        for around in (torch.autocast, autocast):
            with around("cpu", torch.bfloat16):
                assert dtype() is torch.bfloat16
        assert dtype() is torch.float16
    assert dtype() is torch.bfloat16


def test_a_dtype_that_torch_was_given_is_not_taken_for_a_regions(monkeypatch):
    before = torch.get_autocast_dtype("cpu")
    with autocast("cpu", torch.float16):
        made("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert made("cpu").fast_dtype is torch.float16
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert made("cpu").fast_dtype is before


def test_each_region_has_the_cache_that_it_was_given(int8_kernels):
    caches = [polycast.WeightCache() for _ in range(3)]
    for more in ({}, {"recipe": "rounded"}):
        assert [made("cpu", cache=cache, **more)._settings.cache for cache in caches] == caches
        assert made("cpu", **more)._settings.cache is None


def test_threads_and_collections_in_the_middle_get_the_settings_of_their_arguments():
    dtypes = [torch.bfloat16, torch.float16]

    def construct():
        wrong = []
        for count in range(400):
            dtype, enabled, cache_enabled = dtypes[count % 2], count % 3 > 0, (None, True, False)[count % 5 % 3]
            region = autocast("cpu", dtype, enabled, cache_enabled=cache_enabled)
            if region._settings[:4] != ("cpu", enabled, dtype, cache_enabled):
                wrong.append(region)
            if count % 50 == 0:
                gc.collect(0)
                polycast.plugin.refresh("cpu")
        return wrong

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(construct) for _ in range(4)]
        assert [result.result(timeout=60) for result in results] == [[]] * 4


def test_a_region_keeps_its_dtype_when_the_backend_changes_its_own(hand_made):
    backend = hand_made("cpu", default_dtype=torch.bfloat16)
    before = made("cpu")
    backend.default_dtype = torch.float16
    polycast.plugin.refresh("cpu")
    assert (before.fast_dtype, made("cpu").fast_dtype) == (torch.bfloat16, torch.float16)
    with before:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_regions_with_a_cache_install_what_they_need_again_after_uninstall(int8_kernels):
    cache, x = polycast.WeightCache(), torch.randn(2, 4)
    weight = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)
    for count in (1, 2, 3):
        for more in ({}, {"recipe": "rounded"}):
            with autocast("cpu", cache=cache, **more):
                assert torch.mm(x, weight).dtype is torch.bfloat16
                assert "cpu" in installed
        assert cache.stats().misses == 1, count
        polycast.uninstall()
        assert not installed


def test_the_signatures_are_known_on_every_engine():
    class Inherits(autocast):
        pass

    class HasItsOwn(autocast):
        def __init__(self, level: int) -> None:
            super().__init__("cpu")

    with made("cpu"), Inherits("cpu"), HasItsOwn(1):
        pass
    names = [*inspect.signature(autocast.__init__).parameters][1:]
    assert (names[:2], names[-1]) == (["device_type", "dtype"], "recipe")
    for cls in (autocast, Inherits):
        assert [*inspect.signature(cls).parameters] == names
        assert [*inspect.signature(functools.partial(cls, "cpu")).parameters] == names[1:]
        spec = inspect.getfullargspec(cls)
        assert [*spec.args[1:], *spec.kwonlyargs] == names
        assert spec.varargs is spec.varkw is None
    assert [*inspect.signature(HasItsOwn).parameters] == ["level"]
    assert typing.get_type_hints(autocast.__init__)["enabled"] is bool
    assert [*inspect.signature(autocast.__enter__).parameters] == ["self"]
    assert [*inspect.signature(autocast.__exit__).parameters] == ["self", "exc_info"]
    assert [*inspect.signature(autocast("cpu").__exit__).parameters] == ["exc_info"]


def test_no_cache_is_kept_alive():
    cache = polycast.WeightCache()
    with made("cpu", cache=cache):
        pass
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_a_subclass_resolves_its_own_arguments(int8_kernels):
    class Mine(autocast):
        def __init__(self, dtype, *, fast):
            super().__init__("cpu", dtype, recipe="rounded" if fast else None)
            self.mine = fast

    for fast in (True, False, True):
        region = Mine(torch.float16, fast=fast)
        assert (region.mine, region.fast_dtype, region._settings.override is not None) == (fast, torch.float16, fast)
        with region:
            assert torch.get_autocast_dtype("cpu") is torch.float16


@pytest.mark.parametrize("engine", ["native"], indirect=True)
@pytest.mark.parametrize("make", [dict, lambda: {"recipe": "rounded"}, lambda: {"cache": polycast.WeightCache()}])
def test_the_native_engine_runs_no_python_of_its_own(make, int8_kernels):
    arguments = make()
    with autocast("cpu", **arguments):  # chooses the engine
        pass
    made("cpu", **arguments)
    seen = []

    def note(frame, event, _):
        seen.append((event, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        with autocast("cpu", **arguments):
            pass
    finally:
        sys.setprofile(None)
    assert [name for event, name in seen if event == "call"] == ["__new__", "is_dynamo_compiling"]


def test_a_subclass_that_replaces_its_settings_gets_an_error():
    class Mine(autocast):
        def __init__(self, settings):
            super().__init__("cpu")
            self._settings = settings

    for settings in ({}, (1, 2), None):
        with pytest.raises((RuntimeError, AttributeError)), Mine(settings):
            pass
    assert not torch.is_autocast_enabled("cpu")


IN_A_FORK = """
import copy, os, sys
import torch
import polycast

torch.set_num_threads(1)
ARGUMENTS = [{}, {"dtype": torch.float16}, {"enabled": False, "cache_enabled": True}]


def construct(**arguments):
    names = set()
    sys.setprofile(lambda frame, event, _: names.add(frame.f_code.co_name))
    region = polycast.autocast("cpu", **arguments)
    sys.setprofile(None)
    return region._settings, "resolve" in names


for arguments in 2 * ARGUMENTS:  # the first one chooses the engine
    with polycast.autocast("cpu", **arguments):
        pass
before = [construct(**arguments) for arguments in ARGUMENTS]
child = os.fork()
if not child:
    kept = [construct(**arguments) for arguments in ARGUMENTS] == before
    with polycast.autocast("cpu"):
        kept = kept and torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    backend = copy.copy(polycast.plugin.get_backend("cpu"))
    vars(backend)["default_dtype"] = torch.float16
    polycast.plugin.register_backend(backend)
    settings, is_resolved = construct()
    os._exit(0 if kept and is_resolved and settings.dtype is torch.float16 else 1)
print(os.waitpid(child, 0)[1], [is_resolved for _, is_resolved in before])
print([construct(**arguments) for arguments in ARGUMENTS] == before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_they_serve_a_forked_child_until_its_backend_is_another(run_program, engine):
    expected = f"0 {[engine == 'reference'] * 3}\nTrue\n"
    assert run_program(IN_A_FORK, engine, timeout=60) == (0, expected, "")
