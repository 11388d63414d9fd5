"""The example of a device of one's own, from its wheel: its tests, and what it trains, in a clean environment."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "polycast-npy"
SHARED = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def run(*command, cwd):
    """Run a command away from the checkout, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("POLYCAST_", "PYTHON"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def environment(make_once, built):
    """Return the Python of an environment with the wheels of polycast and of the example over the packages here."""
    return _python(make_once("npy", lambda folder: _make_environment(folder, *built.glob("*.whl"))))


def _python(folder):
    return folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _make_environment(folder, wheel):
    copy = shutil.copytree(
        EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "dist", "__pycache__", "*.egg-info")
    )
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, copy, cwd=folder)
    venv.create(folder / "venv", with_pip=False, symlinks=os.name != "nt")
    python = _python(folder)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    wheels = [wheel, *folder.glob("*.whl")]
    # Without bytecode: each run compiles what it imports first.
    options = ("--no-deps", "--no-index", "--no-compile")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *wheels, cwd=folder)
    Path(packages, "shared.pth").write_text("\n".join(SHARED) + "\n")
    # Compile the native engine here, since a program that does so prints that.
    program = """
import polycast, polycast_npy
with polycast.observe(): polycast.install("cpu")
print(polycast.__file__, polycast_npy.__file__)
"""
    where = run(python, "-c", program, cwd=folder).splitlines()[-1].split()
    assert [Path(path).is_relative_to(packages) for path in where] == [True, True]


def test_its_own_tests_pass_on_the_wheels(environment, tmp_path):
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(EXAMPLE / "pyproject.toml", tmp_path)
    # Other tracebacks, also of the failures that are expected, take long: pytest parses the sources.
    printed = run(environment, "-m", "pytest", "-q", "--tb=native", cwd=tmp_path)
    passed = re.search(r"(\d+) passed", printed)
    assert passed is not None, printed
    assert int(passed[1]) > 200
    suite = "tests/test_conformance.py::TestNpy::test_op[aten::vdot-{}]"  # is printed, for it is expected to fail
    assert [engine for engine in ("native", "reference") if suite.format(engine) in printed] == ["native", "reference"]


def test_it_trains_a_perceptron_and_a_convolutional_network(environment, tmp_path):
    pytest.importorskip("sklearn", reason="what it trains on comes with scikit-learn")
    script = shutil.copy(EXAMPLE / "train_digits.py", tmp_path)
    printed = run(environment, "-W", "error", script, "--epochs", "2", cwd=tmp_path)
    first, *lines = printed.splitlines()
    assert re.fullmatch(r"npy: ready, from polycast-npy \S+, torch\.float16", first)
    found = [re.fullmatch(r"(\w+): (\S+)% of the test images, computed in (\S+)", line).groups() for line in lines]
    runs = itertools.product(("mlp", "cnn"), ("torch.float32", "torch.float16"))
    assert [(name, dtype) for name, _, dtype in found] == list(runs)
    assert min(float(share) for _, share, _ in found) > 75


def test_its_readme_shows_what_it_prints(environment, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", (EXAMPLE / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        printed = run(environment, "-W", "error", "-c", block, cwd=tmp_path)
        assert printed.splitlines() == re.findall(r"print\(.*  # (.+)$", block, re.MULTILINE)


def test_polycast_does_not_know_the_example():
    sources = [path for folder in ("core", "backends", "plugins") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in sources if "polycast_npy" in path.read_text(encoding="utf-8")] == []
