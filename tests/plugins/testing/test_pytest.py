"""The suite of ``polycast_plugins.testing`` from the outside, and that other runs of pytest get no option of it."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PLUGIN = """
import polycast, torch
from polycast_backends.cpu import CpuBackend

class Acme(CpuBackend):
    device_type = "mtia"
    policies = dict.fromkeys(
        ("aten::mm", "aten::exp", "aten::celu", "aten::cudnn_convolution"), polycast.CastPolicy.FP32
    )

    def availability(self):
        return polycast.plugin.Availability(False, "no board")

    def is_capturing(self):
        raise OSError("no driver")

@polycast.plugin.hookimpl
def polycast_backend():
    return Acme()
"""

CHANGES = """
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.use_deterministic_algorithms(True)
torch.set_num_threads(7)
torch.set_autocast_enabled("cpu", True)
torch.manual_seed(1)
torch.backends.cudnn.benchmark = True
"""


SUITE = ("-p", "polycast_plugins.testing.options", "--pyargs", "polycast_plugins.testing")
RUN = "import warnings, sys, pytest; warnings.simplefilter('error'); raise SystemExit(pytest.main(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def _installed(distribution):
    distribution("acme-mtia", {"mtia": "acme_mtia"}, {"acme_mtia.py": PLUGIN})


@pytest.fixture
def environment(folder):
    others = {name: value for name, value in os.environ.items() if not name.startswith(("POLYCAST_", "PYTEST_"))}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**others, "POLYCAST_ENGINE": "reference", "PYTHONPATH": path, "COLUMNS": "200"}


@pytest.fixture
def run(environment, launch, tmp_path):
    """Return a function that runs pytest in an empty folder, in a process that has imported polycast."""

    def run(*arguments, before="", **variables):
        variables = {**environment, **variables}
        arguments = ("-W", "error", "-p", "no:cacheprovider", *arguments)
        return launch(
            before + RUN, *arguments, imports="torch, polycast, pytest", folder=tmp_path, environment=variables
        )

    return run


@pytest.fixture
def suite(run):
    """Return a function that runs the suite; `arguments` follow the name of the device."""

    def suite(device, *arguments):
        options = ["-q", "-rA", "--tb=short", "--polycast-backend", device]
        return run(*SUITE, *options, *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    return suite


def test_the_suite_runs_for_a_device_and_tells_what_was_not_called_what_fails_and_what_no_longer_does(tmp_path, suite):
    (tmp_path / "expected.txt").write_text("""
# what fake tensors of it cannot do
test_is_capturing  there is no driver
aten::exp  it was missing once
test_contract  and so was much
""")
    done = suite(
        *("mtia", "--polycast-fake", "--polycast-expected-failures", "expected.txt"),
        *("-k", "test_op or contract or availability or capturing or expected_failures"),
    )
    found = {line.partition("::TestBackend::")[2] for line in done.stdout.splitlines() if "::TestBackend::" in line}
    assert done.returncode == 1, done.stdout
    assert {
        "test_op[aten::mm]",
        "test_is_capturing - there is no driver",
        "test_op[aten::exp] - [XPASS(strict)] it was missing once",
        "test_contract - [XPASS(strict)] and so was much",
        "test_availability",
        "test_availability_of_recipes",
        "test_expected_failures",
    } <= found
    assert "aten::celu was not called: no arguments for it are known" in done.stdout
    assert "aten::cudnn_convolution was not called: fake tensors of mtia cannot run it" in done.stdout
    assert "2 failed, 5 passed, 2 skipped" in done.stdout
    assert "1 xfailed" in done.stdout


def test_a_plugin_that_changes_torch_is_told_each_change(folder, suite):
    (folder / "acme_mtia.py").write_text(PLUGIN + CHANGES)
    done = suite("mtia", "-k", "test_import")
    assert done.returncode == 1, done.stdout
    message = next(line for line in done.stdout.splitlines() if "changed torch for the whole process" in line)
    for change in (
        "cudnn benchmark from False to True",  # polycast does not undo it
        "the default dtype",
        "the default device",
        "the grad mode",
        "deterministic algorithms",
        "the number of threads",
        "the random numbers",
    ):
        assert change in message
    assert "autocast enabled" not in message  # polycast imports plugins with autocast off, and restores it


def test_a_broken_plugin_fails_with_its_cause(folder, suite):
    (folder / "acme_mtia.py").write_text("raise ValueError('no firmware')")
    done = suite("mtia", "-k", "test_contract")
    assert done.returncode != 0
    assert "acme-mtia 1.0 (acme_mtia) could not be loaded: ValueError: no firmware" in done.stdout


def test_no_device_named_is_a_usage_error(run):
    done = run(*SUITE, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode != 0
    assert "names no backend: set the attribute `backend` to its device type, or run" in done.stdout


OTHER = """
import sys

def test_other(request):
    imported = {name.partition(".")[0] for name in sys.modules}
    assert imported.isdisjoint({"polycast", "torch"})
"""


def test_another_run_of_pytest_imports_neither_polycast_nor_torch(tmp_path, environment):
    (tmp_path / "test_other.py").write_text(OTHER)
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_other.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1].partition(" in ")[0]) == (0, "1 passed"), done.stdout


def test_a_run_of_pytest_in_a_process_that_has_polycast_warns_of_nothing(tmp_path, run):
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    done = run(before="import polycast; polycast.backends(); ")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout
