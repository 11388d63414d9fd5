"""Random programs of regions, torch's regions and switches, on several threads, against a model of the state."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import polycast

DEVICES = ("cpu", "hpu")
DTYPES = (torch.bfloat16, torch.float16)
REGIONS = [
    {"device_type": device_type, "dtype": dtype, "enabled": enabled, "cache_enabled": cache_enabled}
    for device_type in DEVICES
    for dtype, enabled, cache_enabled in [
        (torch.bfloat16, True, None),
        (torch.float16, True, False),
        (torch.float16, False, True),
    ]
]

steps = st.one_of(
    *(st.tuples(st.just(kind), st.integers(0, len(REGIONS) - 1)) for kind in ("enter", "exit", "raise", "torch_enter")),
    st.tuples(st.just("torch_exit")),
    st.tuples(st.just("set_enabled"), st.sampled_from(DEVICES), st.booleans()),
    st.tuples(st.just("set_dtype"), st.sampled_from(DEVICES), st.sampled_from(DTYPES)),
    st.tuples(st.just("set_cache"), st.booleans()),
)
programs = st.lists(st.tuples(st.integers(0, 2), steps), max_size=40)


def delete_last(items, item):
    """Delete the last of equal items, and return its position."""
    position = len(items) - 1 - items[::-1].index(item)
    del items[position]
    return position


class Model:
    """The state of one thread. A device has values v0 ... vn, where vk holds while k of its regions are entered.

    Leaving the k-th region forgets the value vk, so that leaving in any order comes to v0.
    """

    def __init__(self, initial):
        self.values = {device_type: [initial[device_type]] for device_type in DEVICES}
        self.owners = {device_type: [] for device_type in DEVICES}
        self.caches = [initial["cache"]]
        self.order = []
        self.torch_regions = []
        self.chosen = set()

    def observe(self):
        seen = {name: (self.values[name][-1][0], self.dtype(name), len(self.owners[name])) for name in DEVICES}
        return {**seen, "cache": self.caches[-1]}

    def dtype(self, name):
        """Torch's first dtype for hpu is not the backend's default, and counts only where it was set."""
        enabled, dtype = self.values[name][-1]
        unset = name == "hpu" and dtype is torch.bfloat16 and not (enabled or self.owners[name] or name in self.chosen)
        return torch.float16 if unset else dtype

    def enter(self, number):
        region = REGIONS[number]
        name = region["device_type"]
        self.values[name].append((region["enabled"], region["dtype"]))
        self.owners[name].append(number)
        self.caches.append(self.caches[-1] if region["cache_enabled"] is None else region["cache_enabled"])
        self.order.append(number)

    def exit(self, number):
        name = REGIONS[number]["device_type"]
        if number not in self.owners[name]:
            return RuntimeError
        del self.values[name][delete_last(self.owners[name], number) + 1]
        del self.caches[delete_last(self.order, number) + 1]
        return None

    def torch_enter(self, number):
        region = REGIONS[number]
        name = region["device_type"]
        self.torch_regions.append((name, self.values[name][-1], self.caches[-1]))
        self.values[name][-1] = (region["enabled"], region["dtype"])
        if region["cache_enabled"] is not None:
            self.caches[-1] = region["cache_enabled"]

    def torch_exit(self):
        name, before, cache = self.torch_regions.pop()
        self.values[name][-1] = before
        self.caches[-1] = cache

    def set_enabled(self, name, enabled):
        dtype = self.dtype(name) if enabled else self.values[name][-1][1]
        self.values[name][-1] = (enabled, dtype)

    def set_dtype(self, name, dtype):
        if not self.owners[name]:
            self.chosen.add(name)
        self.values[name][-1] = (self.values[name][-1][0], dtype)

    def set_cache(self, enabled):
        self.caches[-1] = enabled


class Real:
    """Run the same steps on polycast and on torch."""

    def __init__(self, regions):
        self.regions = regions
        self.torch_regions = []

    @staticmethod
    def observe():
        functions = polycast.is_autocast_enabled, polycast.get_autocast_dtype, polycast.autocast_nesting
        seen = {name: tuple(function(name) for function in functions) for name in DEVICES}
        assert all(seen[name][0] is torch.is_autocast_enabled(name) for name in DEVICES)
        return {**seen, "cache": polycast.is_autocast_cache_enabled()}

    def enter(self, number):
        self.regions[number].__enter__()

    def exit(self, number):
        try:
            self.regions[number].__exit__(None, None, None)
        except RuntimeError:
            return RuntimeError
        return None

    def do_raise(self, number):
        with pytest.raises(ZeroDivisionError), self.regions[number]:
            raise ZeroDivisionError

    def torch_enter(self, number):
        self.torch_regions.append(torch.autocast(**REGIONS[number]))
        self.torch_regions[-1].__enter__()

    def torch_exit(self):
        self.torch_regions.pop().__exit__(None, None, None)

    set_enabled = staticmethod(polycast.set_autocast_enabled)
    set_dtype = staticmethod(polycast.set_autocast_dtype)
    set_cache = staticmethod(polycast.set_autocast_cache_enabled)


def run_step(model, real, step):
    kind, *arguments = step
    if kind == "raise":
        real.do_raise(*arguments)
    elif kind != "torch_exit" or model.torch_regions:
        assert getattr(model, kind)(*arguments) == getattr(real, kind)(*arguments)
    assert real.observe() == model.observe()


@pytest.fixture
def regions_of_hpu(hand_made):
    """Return one instance of each region, shared by all threads."""
    hand_made("hpu")
    return [polycast.autocast(**region) for region in REGIONS]


def start():
    initial = {name: (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in DEVICES}
    return {**initial, "cache": torch.is_autocast_cache_enabled()}


@pytest.mark.slow
@given(program=programs)
@example(program=[(0, ("enter", 1)), (0, ("enter", 0)), (0, ("exit", 1)), (0, ("exit", 0))])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_state_of_every_thread_is_the_models_after_every_step(program, engine, regions_of_hpu):
    with ThreadPoolExecutor(1) as a, ThreadPoolExecutor(1) as b, ThreadPoolExecutor(1) as c:
        runs = [(thread, Model(thread.submit(start).result()), Real(regions_of_hpu)) for thread in (a, b, c)]
        for number, step in program:
            thread, *both = runs[number]
            thread.submit(run_step, *both, step).result()
        for thread, model, real in runs:
            for number in model.order.copy():
                thread.submit(run_step, model, real, ("exit", number)).result()


@pytest.mark.slow
def test_sixteen_threads_enter_thousands_of_regions_and_leave_no_trace(engine, hand_made):
    hand_made("hpu")
    shared = polycast.autocast("cpu")

    def work(number):
        before = start()
        for turn in range(2000):
            with shared, polycast.autocast("cpu", enabled=bool((number + turn) % 2)), shared:
                assert polycast.autocast_nesting("cpu") == 3
        return before == start() and polycast.autocast_nesting("cpu") == 0

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_the_default_dtype_is_the_backends_where_torch_starts_with_another(hand_made, in_thread):
    hand_made("hpu", default_dtype=torch.float16)
    assert torch.get_autocast_dtype("hpu") is torch.bfloat16
    assert in_thread(lambda: polycast.get_autocast_dtype("hpu")) is torch.float16
    assert in_thread(lambda: polycast.autocast("hpu").fast_dtype) is torch.float16


def test_a_dtype_that_was_set_is_kept_though_torch_starts_with_it(hand_made, in_thread):
    hand_made("hpu", default_dtype=torch.float16)

    def run():
        with polycast.autocast("hpu", dtype=torch.bfloat16):
            inner = polycast.autocast("hpu").fast_dtype
        polycast.set_autocast_dtype("hpu", torch.bfloat16)
        return inner, polycast.autocast("hpu").fast_dtype

    assert in_thread(run) == (torch.bfloat16, torch.bfloat16)
