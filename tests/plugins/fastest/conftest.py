"""Fixtures: an empty cache, a measurement that takes no time, and a clock that stands still."""

import time
from collections import Counter

import pytest
import torch

import polycast
from polycast.toolchain import cache_folder
from polycast_plugins.fastest import fastest_plan, op_timer
from polycast_plugins.fastest import measure as measuring
from polycast_plugins.fastest import profile as profiles
from polycast_plugins.fastest.cases import Case
from polycast_plugins.fastest.measurement import Measurement
from polycast_plugins.fastest.op_timer import OpTimer
from polycast_plugins.fastest.operands import MeasuredWay
from polycast_plugins.fastest.profile_file import Conditions
from polycast_plugins.fastest.recorded_ways import Ways, choose_recorded
from polycast_plugins.fastest.stopwatch import PreemptionWatch, Stopwatch

ROWS = (1, 4, 16, 128, 1024)
FLOAT32 = MeasuredWay("float32", torch.float32, torch.bfloat16)
BFLOAT16 = MeasuredWay("bfloat16", torch.bfloat16, torch.bfloat16)


def by_rows(timer, way):
    """Return the measurements of a way by rows."""
    return {each.rows: each for each in timer.measurements() if each.way == way}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return the folder of the profiles, which is not there yet."""
    monkeypatch.setattr(cache_folder, "cache_directory", lambda: tmp_path / "polycast")
    monkeypatch.delenv("POLYCAST_PROFILE", raising=False)
    profiles.forget()
    yield tmp_path / "polycast" / "profiles"
    profiles.forget()


class Measured:
    """Stands in for measuring: counts, and can be made to do something else."""

    def __init__(self):
        self.count = 0
        self.times = {}
        self.noisy = False
        self.other_load = 0.0
        self.instead = lambda: None

    def __call__(self, backend):
        self.count += 1
        self.instead()
        now = Conditions.now(backend)
        times = {"float32": 1e-3, "bfloat16": 2e-3 + self.count * 1e-4, **self.times}
        return polycast.DeviceProfile(
            now.device_type,
            now.device,
            now.threads,
            now.versions,
            now.details,
            tuple(Measurement("linear", 128, way, each, noisy=self.noisy) for way, each in times.items()),
            1e10,
            other_load=self.other_load,
            date=f"2026-05-0{self.count} 09:30 UTC",
        )


@pytest.fixture
def measured(kept, monkeypatch):
    """Replace measuring by something quick."""
    found = Measured()
    monkeypatch.setattr(measuring, "measure", found)
    return found


@pytest.fixture(scope="session")
def recipe_of(profile_of):
    """Return a function that makes the recipe for a machine where only the work of a call takes time."""
    return lambda **ways: polycast.Fastest(profile_of(**{"overhead": 1e-15, "cast": 1e-15, **ways}))


@pytest.fixture
def float32_way(recipe_of):
    """Return the recipe for a machine where only float32 is fast, also where an autograd function costs more."""
    return recipe_of(bfloat16=1e9, float16=1e9)


@pytest.fixture
def slow(recipe_of):
    """Return the recipe for a machine where float32 is faster."""
    return recipe_of(bfloat16=9.0, float16=9.0)


@pytest.fixture
def quick(recipe_of):
    """Return the recipe for a machine where the fast dtypes are faster."""
    return recipe_of(bfloat16=0.1, float16=0.1)


class Kernel(polycast.plugin.LowBitKernel):
    """A linear for the fast dtype, which adds one so that its results can be recognized."""

    uses_cast = True
    takes_float32 = True

    def __init__(self):
        self.casts = []

    def unsupported_reason(self, x, weight, bias):
        return "many rows" if x.numel() > 4 * x.shape[-1] else None

    def run(self, prepacked, x, weight, bias):
        (cast,) = prepacked
        self.casts.append(cast)
        return (torch.nn.functional.linear(x.to(cast.dtype), cast) + 1).bfloat16()


@pytest.fixture
def register_kernel(other_cpu):
    """Return a function that registers a backend for the CPU with a kernel, and returns the kernel."""

    def register():
        made = Kernel()
        other_cpu(low_bit_kernels=lambda recipe: {"aten::linear": made} if recipe.kind == "fastest" else {})
        return made

    return register


class Clock:
    """A clock that runs only when a function says how long it takes, and whether it was preempted."""

    def __init__(self):
        self.now = 0.0
        self.is_preempted = False
        self.calls = Counter()

    def __call__(self):
        return self.now

    def case(self, rows, size, work, seconds):
        """Return a case of linear, given the seconds by way, work and number of earlier calls."""

        def function(way):
            before = self.calls[way, work]
            self.calls[way, work] += 1
            self.now += seconds(way, work, before)

        return Case("linear", rows, size, work, function, lambda way, operands: (way.name,))

    def cases(self, seconds, works=ROWS, size=64):
        return [self.case(work, size, work, seconds) for work in works]


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", found)
    # The machine that runs the tests may be busy.
    monkeypatch.setattr(PreemptionWatch, "was_preempted", lambda self: found.is_preempted)
    monkeypatch.setattr(op_timer, "load_of_others", lambda: 0.0)
    return found


@pytest.fixture
def run_cases(clock, monkeypatch):
    """Return a function that times cases by a clock, and returns the `OpTimer`."""

    def run_cases(cases, ways=(FLOAT32,)):
        monkeypatch.setattr(op_timer, "cases", lambda: cases)
        timer = OpTimer("cpu", ways)
        timer._stopwatch = Stopwatch("cpu", clock)
        timer.run()
        return timer

    return run_cases


@pytest.fixture
def run(clock, run_cases):
    """Return a function that times the cases of a clock, given the seconds of a call, and returns the `OpTimer`."""
    return lambda seconds, ways=(FLOAT32, BFLOAT16), **options: run_cases(clock.cases(seconds, **options), ways)


@pytest.fixture
def queues(monkeypatch):
    """Take the CPU for an accelerator that queues calls."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)


@pytest.fixture
def choose_ways(monkeypatch):
    """Return a function that sets the ways of the forward and of each gradient; None: by the profile."""

    def choose(ways):
        given = choose_recorded if ways is None else lambda *_: Ways(*ways, "for a test")
        monkeypatch.setattr(fastest_plan, "choose_recorded", given)

    return choose
