"""The packages that ``polycast new-backend`` and ``new-plugin`` write install, and pass their tests."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.plugins.cli.test_scaffold import EXTEND, PLUGIN, new

PACKAGES = {
    "acme": (("new-backend",), 120),
    "hpu": (("new-backend",), 120),
    "made-odd": (EXTEND, 12),
    "made-absent": (("new-backend", "--extend", "xpu"), 4),
    "made-more": (PLUGIN, 3),
}
"""The command that writes each package, and the least number of its tests that pass."""


@pytest.fixture(scope="module")
def installed(make_once):
    """Return a folder with the packages, and what the printed commands have installed, in its folder ``site``."""
    pytest.importorskip("pip", reason="pip is not installed here")
    return make_once("written_packages", _install)


def _install(folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        done = [new(name, command=command) for name, (command, _) in PACKAGES.items()]
    assert [each.output for each in done if each.exit_code] == []
    commands = [each.stdout.strip().partition("then: ")[2].split(" && ") for each in done]
    (folder / "tests.json").write_text(json.dumps(dict(zip(PACKAGES, (test for _, test in commands), strict=True))))
    # All by one command. Nothing comes from the package index: what is needed is here.
    pip = f"PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_NO_BUILD_ISOLATION=0 PIP_TARGET=site {shlex.quote(sys.executable)} -m pip"
    assert {install.partition(" install ")[0] for install, _ in commands} == {"pip"}
    places = [install.removeprefix("pip install -e ") for install, _ in commands]
    must_run("sh", "-c", f"{pip} install --disable-pip-version-check {' '.join(places)}", cwd=folder)


def must_run(*command, **options):
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def run_there(installed, launch):
    """Return a function that runs a script beside the packages, in a process that has the imports."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("POLYCAST_", "PYTEST_"))}
    path = os.pathsep.join([str(installed / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # As on a machine without a compiler, where polycast warns.
    variables |= {"PYTHONPATH": path, "CXX": str(installed / "none"), "XDG_CACHE_HOME": str(installed / "cache")}

    def run(script, *arguments):
        done = launch(script, *arguments, imports="torch, polycast, pytest", folder=installed, environment=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_the_printed_command_has_installed_passes_its_tests(installed, run_there, name):
    command, *where = shlex.split(json.loads((installed / "tests.json").read_text())[name])
    assert command == "pytest"
    script = "import pytest, sys; raise SystemExit(pytest.main(sys.argv[1:]))"
    said = run_there(script, *where, "-p", "no:cacheprovider", "-q")
    assert "failed" not in said
    assert int(said.rpartition(" passed")[0].rpartition("\n")[2]) >= PACKAGES[name][1]


@pytest.mark.slow
def test_installed_backends_are_listed(run_there):
    script = "import runpy, sys; sys.argv[0] = 'polycast'; runpy.run_module('polycast', run_name='__main__')"
    listed = {each["device_type"]: each for each in json.loads(run_there(script, "devices", "--json"))}
    for device in ("acme", "hpu"):
        assert (listed[device]["state"], listed[device]["distribution"]) == ("unavailable", f"polycast-{device}")


@pytest.fixture(scope="module")
def ruff():
    """Return the path of ruff."""
    path = Path(sys.executable).with_name("ruff")
    if not path.exists():
        pytest.skip("ruff is not installed here")
    return path


@pytest.mark.parametrize("name", ["aardvark", "low-bit", "matmul-x", "ops-of-a-long-name-of-many-words", "zebra"])
def test_the_imports_of_a_package_are_sorted_whatever_its_name(here, ruff, name):
    for command in (EXTEND, PLUGIN):
        assert new(name if command is EXTEND else f"{name}-plugin", command=command).exit_code == 0
    must_run(ruff, "check", "--isolated", "--select=I", ".", cwd=here)


def test_the_package_is_formatted_and_lints_without_errors(here, ruff):
    for device in ("acme", "hpu"):
        new(device)
    new("made-odd", command=EXTEND)
    new("made-odd-plugin", command=PLUGIN)
    must_run(ruff, "format", "--isolated", "--line-length=120", "--check", ".", cwd=here)
    must_run(ruff, "check", "--isolated", "--line-length=120", "--select=E,F,W,I,UP,B,RUF", ".", cwd=here)
