"""The conformance suite passes on a device without a plugin, which the generic backend serves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NPY = Path(__file__).parents[3] / "examples" / "polycast-npy"
SUITE = """
import pytest
import polycast, polycast_npy
from polycast_plugins.testing import BackendConformance

polycast_npy.register_device()


def test_it_is_generic():
    assert polycast.backends()["npy"].state == "generic"


@pytest.mark.filterwarnings("ignore:npy. no package has a backend for it")
class TestNpy(BackendConformance):
    backend = "npy"
    expected_failures = {failures!r}
"""


def test_the_suite_passes_on_the_example_without_its_plugin(engine, tmp_path):
    pytest.importorskip("numpy", reason="the device computes with NumPy")
    path = tmp_path / "test_npy.py"
    path.write_text(SUITE.format(failures=str(NPY / "tests" / "expected_failures.txt")))
    done = subprocess.run(
        # Other tracebacks, also of the failures that are expected, take long: pytest parses the sources.
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "--tb=native", "-p", "no:cacheprovider", path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(NPY / "src"), *sys.path]), "POLYCAST_ENGINE": engine},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
