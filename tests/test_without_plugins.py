"""The core and the backends where plugins/ and its entry points are deleted, in an environment of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="the environment has links")]

ROOT = Path(__file__).parents[1]
PROGRAM = """
import importlib, pkgutil, sys
import torch
import polycast, polycast_backends

layer, x, cache = torch.nn.Linear(8, 8), torch.ones(2, 8), polycast.WeightCache()
for _ in range(2):
    with torch.no_grad(), polycast.autocast("cpu", policy={"softmax": "lower_precision_fp"}, cache=cache):
        y = layer(x)
        print(y.dtype, y.softmax(1).dtype, torch.mm(x, x.t()).dtype, torch.nn.functional.mse_loss(y, y).dtype)
print(cache.stats().hits, cache.stats().misses)
print(polycast.plugin.choose_engine().name, polycast.backends()["cpu"].state, len(polycast.plugin.manifests()))
for name in ("observe", "compare", "no_such_name"):
    try:
        getattr(polycast, name)
    except AttributeError as error:
        print(error)
try:
    polycast.autocast("cpu", recipe="int8")
except ValueError as error:
    print(error)
for package in (polycast, polycast_backends):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(("__main__", "_triton")):
            importlib.import_module(module.name)
print([name for name in sys.modules if name.startswith("polycast_plugins")])
"""


@pytest.fixture(scope="module")
def environment(make_once):
    """Return the folder of the copy, and the Python of an environment with that and no other polycast."""
    pytest.importorskip("pip", reason="pip is not installed here")
    folder = make_once("without_plugins", _make)
    return folder / "tree", folder / "environment" / "bin" / "python"


def _make(folder):
    tree, environment = folder / "tree", folder / "environment"
    subprocess.run([sys.executable, ROOT / "tools" / "without_plugins.py", tree], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    for path in map(Path, sys.path):
        for each in path.iterdir() if path.name in ("site-packages", "dist-packages") else ():
            if "polycast" not in each.name and not (packages / each.name).exists():
                (packages / each.name).symlink_to(each)
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--no-build-isolation", "--no-deps", "--no-index", tree], folder)


def run(command, folder, **variables):
    others = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(command, cwd=folder, env={**others, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_regions_policies_and_caches_work_and_names_of_plugins_say_whose_they_are(environment, engine):
    tree, python = environment
    dtypes = "torch.bfloat16 torch.bfloat16 torch.bfloat16 torch.float32"
    absent = "module 'polycast' has no attribute {!r}: it is of the plugin {!r}, which is not installed."
    assert run([python, "-c", PROGRAM], tree, POLYCAST_ENGINE=engine).splitlines() == [
        dtypes,
        dtypes,
        "2 2" if engine == "native" else "0 0",
        f"{engine} ready 0",
        f"{absent.format('observe', 'observe')} Install polycast again",
        f"{absent.format('compare', 'precision')} Install polycast again",
        "module 'polycast' has no attribute 'no_such_name'",
        "'int8' is not a recipe: it is of the plugin 'quantize', which is not installed. Install polycast again",
        "[]",
    ]


def test_the_tests_of_the_core_and_the_backends_are_collected_and_a_part_of_them_passes(environment):
    """Run those of regions with policies, caches, the registry, plugins of others, and backends.

    ``make test-core`` runs all tests of the core and the backends so.
    """
    tree, python = environment
    part = "test_weight_cache_settings or test_manifests or test_policies or test_found or test_registry or backends"
    printed = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", part, "tests"], tree)
    passed = re.search(r"(\d+) passed, .*?(\d+) deselected", printed)
    assert passed is not None, printed
    assert int(passed[1]) > 200
    assert int(passed[2]) > 2000
