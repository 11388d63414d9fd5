"""The core without any plugin: what it computes, what it says of names that plugins have, and that its tests run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
import tests.without_plugins
import polycast

layer, x, cache = torch.nn.Linear(8, 8), torch.ones(2, 8), polycast.WeightCache()
for _ in range(2):
    with torch.no_grad(), polycast.autocast("cpu", policy={"softmax": "lower_precision_fp"}, cache=cache):
        y = layer(x)
        print(y.dtype, y.softmax(1).dtype, torch.mm(x, x.t()).dtype, torch.nn.functional.mse_loss(y, y).dtype)
print(cache.stats().hits, cache.stats().misses)
print(polycast.backends()["cpu"].state, len(polycast.plugin.manifests()))
for name in ("observe", "compare", "no_such_name"):
    try:
        getattr(polycast, name)
    except AttributeError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_regions_policies_and_caches_work_and_names_of_plugins_say_whose_they_are(engine, monkeypatch):
    monkeypatch.setenv("POLYCAST_ENGINE", engine)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    dtypes = "torch.bfloat16 torch.bfloat16 torch.bfloat16 torch.float32"
    absent = "module 'polycast' has no attribute {!r}: it is of the plugin {!r}, which is not installed."
    assert done.stdout.splitlines() == [
        dtypes,
        dtypes,
        "2 2",
        "ready 0",
        f"{absent.format('observe', 'observe')} Install polycast again",
        f"{absent.format('compare', 'precision')} Install polycast again",
        "module 'polycast' has no attribute 'no_such_name'",
    ]


@pytest.mark.slow
def test_the_tests_of_the_core_and_of_backends_import_no_plugin():
    command = [sys.executable, "-m", "pytest", "-p", "tests.without_plugins", "-n", "0", "-q", "--collect-only"]
    done = subprocess.run(
        [*command, "tests/core", "tests/backends"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
