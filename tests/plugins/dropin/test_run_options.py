"""``polycast run --policy`` and ``--weight-cache``: what the regions of a program get, and what is said of it."""

import pytest

from polycast import Policy

pytestmark = pytest.mark.slow

PROGRAM = """
import multiprocessing, threading, torch, polycast

x = torch.ones(2, 2)

def show():
    with torch.autocast("cpu"):
        print(torch.mm(x, x).dtype, torch.bmm(x[None], x[None]).dtype)

if __name__ == "__main__":
    show()
    thread = threading.Thread(target=show)
    thread.start()
    thread.join()
    with polycast.autocast("cpu", policy={"mm": "lower_precision_fp"}), torch.autocast("cpu"):
        print(torch.mm(x, x).dtype)
    with torch.autocast("cpu", enabled=False):
        print(torch.mm(x, x).dtype)
        with torch.autocast("cpu"):
            print(torch.mm(x, x).dtype)
    print(torch.autocast("cpu")(lambda: torch.mm(x, x))().dtype)
    process = multiprocessing.get_context("spawn").Process(target=show)
    process.start()
    process.join()
"""


def test_the_programs_own_policies_override_the_option(run, tmp_path):
    Policy({"bmm": "fp32"}, devices={"cpu": Policy({"mm": "fp32"})}).save(tmp_path / "policy.toml")
    done = run(PROGRAM, "--quiet", "--policy", "policy.toml")
    fp32, fast = "torch.float32", "torch.bfloat16"
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"{fp32} {fp32}",  # the main thread
        f"{fp32} {fp32}",  # another thread
        fast,
        *[fp32] * 3,
        f"{fp32} {fp32}",  # a spawned process
    ]


def test_the_option_combines_with_wrap_and_with_a_weight_cache(run, tmp_path):
    Policy({"linear": "fp32"}).save(tmp_path / "policy.toml")
    program = """
        import torch

        linear, conv = torch.nn.Linear(2, 2).half(), torch.nn.Conv1d(1, 1, 1)
        with torch.no_grad():
            print(linear(torch.ones(1, 2).half()).dtype, conv(torch.ones(1, 1, 2)).dtype)
    """
    done = run(program, "--policy", "policy.toml", "--wrap", "cpu", "--weight-cache")
    assert done.stdout == "torch.float32 torch.bfloat16\n"
    assert " 2 regions (cpu bfloat16 2), weight cache: " in done.stderr


REPEATED = """
import torch
model, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
for _ in range(3):
{}
"""
GENERATE = """
    with torch.autocast("cpu"), torch.no_grad():
        model(x)
"""
WITHOUT_CACHE = """
    with torch.inference_mode(), torch.autocast("cpu", cache_enabled=False):
        model(x)
"""
ONCE = """
    with torch.no_grad(), torch.autocast("cpu"):
        torch.nn.Linear(4, 4)(x)
"""
BOTH = f"{GENERATE}{ONCE}"
NO_WEIGHT = """
    with torch.no_grad(), torch.autocast("cpu"):
        model.bfloat16()(x)
"""
WITH_GRAD = "3 regions entered with grad on; it is for those under torch.no_grad()"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (WITHOUT_CACHE, "4 hits, 2 misses"),
        (GENERATE, f"0 hits ({WITH_GRAD}), 0 misses"),
        (ONCE, "0 hits (each weight was cast once), 6 misses"),
        (BOTH, f"0 hits ({WITH_GRAD}; each weight was cast once), 6 misses"),
        (NO_WEIGHT, "0 hits (no region cast a weight), 0 misses"),
    ],
    ids=["cache_enabled=False", "generate", "once", "generate and once", "no weight"],
)
def test_the_summary_has_the_hits_or_why_there_are_none(run, body, said):
    done = run(REPEATED.format(body), "--weight-cache", POLYCAST_ENGINE="native")
    assert f"\n{done.stderr}".endswith(f", weight cache: {said}, 0.0 MiB\n"), done.stderr
    assert done.stderr.startswith(f"polycast: native engine, {3 * (1 + (body is BOTH))} regions (cpu bfloat16 ")
