"""``polycast run --recipe``: products below the fast dtype in programs that nobody changed, and what is said then."""

import functools
import time

import pytest
import torch

import polycast
from polycast.plugin import events
from polycast_plugins.dropin.recipe_summary import RecipeSummary

pytestmark = pytest.mark.slow

BEFORE = """
import sys, threading, torch

torch.manual_seed(0)
large, small, x = torch.nn.Linear(512, 512), torch.nn.Linear(512, 16), torch.ones(2, 512)

def forward():
    with torch.no_grad(), torch.autocast("cpu"):
        return small(large(x))
"""
SMALL = "1 linear in the fast dtype: the weight is smaller than the recipe's min_size"


@pytest.fixture
def int8():
    answer = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
    if not answer.available:
        pytest.skip(answer.reason)


@pytest.mark.usefixtures("int8")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_the_summary_counts_the_ops_of_the_recipe_and_gives_reasons_for_the_others(run, engine):
    done = run("print(forward().dtype)", "--recipe", "int8", POLYCAST_ENGINE=engine)
    assert done.stdout == "torch.bfloat16\n"
    share = [  # seen by the observer, which needs the native engine
        "  int8: 97% of the 1.08 MFLOPs in matmuls",
        "  3% not: linear in Linear#2: the weight is smaller than the recipe's min_size",
    ]
    assert done.stderr.splitlines() == [
        f"polycast: {engine} engine, 1 region (cpu bfloat16 1), int8: 1 op",
        f"  {SMALL}",
        *(share if engine == "native" else []),
    ]


@pytest.mark.usefixtures("int8")
def test_the_output_is_near_that_without_a_recipe(run):
    near = "y = forward()\nz = small(large(x))\nprint(not torch.equal(y, z), ((y - z).norm() / z.norm()).item() < 0.03)"
    done = run(near, "--quiet", "--recipe", "int8")
    assert (done.stdout, done.stderr) == ("True True\n", "")


THREADS = """
threads = [threading.Thread(target=forward) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
TRAINING = """
with torch.autocast("cpu"):
    y = large(x)
y.sum().backward()
"""
OWN_RECIPE = """
import polycast
with torch.no_grad(), torch.autocast("cpu"), polycast.autocast("cpu", recipe="none"):
    large(x)
with torch.no_grad(), torch.autocast("cpu", enabled=False):
    large(x)
"""
SUMMARIES = {
    "of all threads": (THREADS, ["int8"], f", int8: 3 ops\n  3{SMALL[1:]}\n  int8: 97% of "),
    "by another recipe": (THREADS, ["int8:tensor"], f", int8:tensor: 3 ops\n  3{SMALL[1:]}\n  int8:tensor: 97% of "),
    "of a training program": (
        TRAINING,
        ["int8"],
        "\n  1 linear in the fast dtype: autograd records it, and quantized kernels have no backward"
        "\n  int8: 0% of the 2.1 MFLOPs in matmuls\n",
    ),
    "where the program has its own recipe": (OWN_RECIPE, ["int8"], ", int8: 0 ops\n"),
    "of a program without a region": (
        "with torch.no_grad():\n    large(x)",
        ["int8", "--wrap", "cpu"],
        ", int8: 1 op\n  int8: 100% of the 1.05 MFLOPs in matmuls\n",
    ),
    "of an observed run": (
        "forward()",
        ["int8", "--observe"],
        "int8 on cpu: linear computed once\n"
        "int8 on cpu: linear declined once: the weight is smaller than the recipe's min_size\n",
    ),
}


@pytest.mark.usefixtures("int8")
@pytest.mark.parametrize("case", SUMMARIES)
def test_the_summary_says_what_the_recipe_did(run, case):
    program, options, said = SUMMARIES[case]
    assert said in run(program, "--recipe", *options, COLUMNS="100").stderr


def test_an_unsupported_recipe_is_reported_and_the_program_runs_in_the_fast_dtype(run):
    done = run("print(forward().dtype)", "--recipe", "float8")
    assert done.stdout == "torch.bfloat16\n"
    assert "RecipeDisabledWarning: Float8() cannot be used on cpu: " in done.stderr
    assert done.stderr.endswith(", float8: 0 ops\n")


@pytest.fixture
def run_unprofiled(run, tmp_path):
    """Return `run` with a profile without measurements."""
    polycast.DeviceProfile("cpu", "a processor", 1, {}, {}, (), 1e10).save(tmp_path / "empty.json")
    return functools.partial(run, POLYCAST_PROFILE="empty.json")


SLOW = """
    import polycast

    class Slow(type(polycast.plugin.get_backend("cpu"))):
        def slow_reason(self, dtype):
            return "it has no such unit"

    polycast.plugin.register_backend(Slow())
"""


@pytest.mark.usefixtures("int8")
def test_slow_dtypes_are_in_the_summary_and_not_warned_about(run_unprofiled):
    program = f"""{SLOW}
    forward()
    forward()
    """
    assert run_unprofiled(program).stderr.splitlines() == [
        "polycast: native engine, 2 regions (cpu bfloat16 2)",
        "  bfloat16 is slow on cpu: it has no such unit. Faster: --recipe fastest, --recipe int8 (inference only)",
    ]
    assert run_unprofiled(program, "--quiet").stderr == ""


@pytest.mark.usefixtures("int8")
def test_no_slow_dtype_is_reported_with_a_recipe_for_all_ops(run_unprofiled):
    program = f"""{SLOW}
    with torch.no_grad(), torch.autocast("cpu"):
        large(x)
    """
    assert "slow" not in run_unprofiled(program, "--recipe", "int8").stderr
    assert "  bfloat16 is slow on cpu: " in run_unprofiled(program + "    forward()", "--recipe", "int8").stderr


def test_a_dtype_that_the_profile_says_is_slow_is_in_the_summary(run, tmp_path, profile_of):
    profile_of(bfloat16=4.0, overhead=0.0).save(tmp_path / "profile.json")
    said = run("forward()", POLYCAST_PROFILE="profile.json").stderr.splitlines()
    assert said[1].startswith("  bfloat16 is slow on cpu: ")  # and why, which depends on the processor
    assert ". Faster: --recipe fastest" in said[1]


def test_the_summary_has_the_way_of_each_op_with_fastest(run, tmp_path, profile_of):
    profile_of(bfloat16=4.0).save(tmp_path / "profile.json")
    said = run("forward()", "--recipe", "fastest", POLYCAST_PROFILE="profile.json").stderr.splitlines()
    assert said[0].endswith(", fastest: 2 ops")
    assert said[1] == "  2 linear by float32"
    assert said[2].startswith("  fastest:float32: ")


@pytest.mark.usefixtures("int8_kernels")
def test_a_long_program_is_observed_in_its_first_seconds(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    summary = RecipeSummary("int8")
    with torch.no_grad():
        for now in (1.0, 9.0, 11.0, 12.0):  # noqa: B007  # which monotonic() returns
            summary.end_if_late()
            with polycast.autocast("cpu", recipe=polycast.Int8(min_size=0)):
                torch.mm(torch.ones(1, 4), torch.nn.Parameter(torch.ones(4, 4)))
    assert summary.text() == "int8: 2 ops in the first 10 s\n  int8: 100% of the 64 FLOPs in matmuls"
    assert not events.recipe_call  # the engine computes calls without Python again
