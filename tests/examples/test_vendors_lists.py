"""The examples with the lists of vendors pass the conformance suite on fake tensors, each in a process of its own."""

import os
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
PASSED = {"hpu": 105, "npu": 90, "xla": 55}
"""Require at least this many checks to pass: one for each op that fake tensors can run, and more."""


@pytest.fixture
def installed(tmp_path):
    """Return a function that makes a folder in which an example is installed."""

    def install(device):
        info = tmp_path / f"polycast_{device}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: polycast-{device}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[polycast.backends]\n{device} = polycast_{device}\n")
        return tmp_path

    return install


@pytest.mark.parametrize("device", PASSED)
def test_an_example_passes_the_conformance_suite(device, installed, run_program):
    """Both engines are tested by the suite of polycast's own backends."""
    example = EXAMPLES / f"polycast-{device}"
    path = os.pathsep.join(map(str, [installed(device), example / "src", *filter(None, sys.path)]))
    script = "import sys, pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", example]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", path)
        status, printed, errors = run_program(script, "native", *options, imports="torch, polycast, pytest")
    assert status == 0, printed + errors
    assert int(re.search(r"(\d+) passed", printed)[1]) >= PASSED[device], printed


@pytest.mark.parametrize("device", PASSED)
def test_an_example_is_short(device):
    (module,) = (EXAMPLES / f"polycast-{device}" / "src").rglob("*.py")
    assert module.read_text(encoding="utf-8").count("\n") < 60
