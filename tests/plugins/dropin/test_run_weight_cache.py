"""``polycast run --weight-cache``: which regions of a program share the cache, and why it has no hits."""

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
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


@pytest.mark.parametrize("engine", ["native", "reference"])
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
def test_the_summary_has_the_hits_or_why_there_are_none(run, body, said, engine):
    done = run(PROGRAM.format(body), "--engine", engine, "--weight-cache")
    assert f"\n{done.stderr}".endswith(f", weight cache: {said}, 0.0 MiB\n"), done.stderr
    assert done.stderr.startswith(f"polycast: {engine} engine, {3 * (1 + (body is BOTH))} regions (cpu bfloat16 ")
