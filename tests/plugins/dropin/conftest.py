"""Fixtures that build the C++ and run programs."""

import inspect
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import polycast

# Dynamo and TorchScript read the signature of the class, which on Python 3.13.0 that of a deprecated one is not.
needs_its_signature = pytest.mark.skipif(
    "dtype" not in inspect.signature(torch.cpu.amp.autocast).parameters,
    reason="torch's own Dynamo cannot tell the arguments of torch.cpu.amp.autocast on this Python",
)
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("POLYCAST_") and name != "RANK"},
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def fast_dtypes(profile_of, tmp_path_factory):
    """Return the file of a profile in which no dtype is slow: summaries do not depend on the machine."""
    path = tmp_path_factory.mktemp("profile") / "fast.json"
    profile_of(bfloat16=0.5, float16=0.5).save(path)
    return str(path)


@pytest.fixture(scope="session")
def _build():
    """Build the C++ once: building at first use prints a line, and tests read the output of programs."""
    subprocess.run([sys.executable, "-m", "polycast", "build"], capture_output=True, check=False)


@pytest.fixture(autouse=True)
def _built_for_programs(request):
    """Build the C++ before tests that run programs."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("_build")


@pytest.fixture
def patched():
    with polycast.patch_torch() as it:
        yield it


@pytest.fixture(scope="session")
def _launched(start_launcher):
    prepare = """
import jinja2, polycast_backends.cpu, polycast_plugins.cli.command_line, polycast_plugins.dropin.run_command
import polycast_plugins.observe.report.run_page, polycast_plugins.quantize.cpu
"""
    return start_launcher(prepare, ENVIRONMENT)


@pytest.fixture
def polycast_run(_launched, fast_dtypes, tmp_path):
    """Return a function that runs ``polycast run`` in the folder of the test; returns what subprocess.run() would."""

    def run(*arguments, folder=tmp_path, stdin="", **environment):
        environment = {**ENVIRONMENT, "POLYCAST_PROFILE": fast_dtypes, **environment}
        script = "import polycast_plugins.cli, sys\nsys.argv[0] = 'polycast'\npolycast_plugins.cli.main()"
        return _launched(script, "run", *map(str, arguments), folder=folder, stdin=stdin, environment=environment)

    return run


@pytest.fixture
def run(request, tmp_path, polycast_run):
    """Return a function that calls ``polycast run`` on a program, which begins with BEFORE of the test's module."""

    def run(program, *options, **environment):
        source = getattr(request.module, "BEFORE", "") + textwrap.dedent(program)
        (tmp_path / "program.py").write_text(source)
        return polycast_run(*options, "program.py", **environment)

    return run
