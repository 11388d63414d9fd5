"""The packages that ``polycast new-backend`` and ``new-plugin`` write install, and pass their tests."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from tests.plugins.cli.test_scaffold import EXTEND, PLUGIN, new


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Make a virtual environment that has what this one has; return its folder of commands, with pip and pytest."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    commands = folder / "bin"
    site = Path(must_run(commands / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "here.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
    for module in ("pip", "polycast", "pytest"):
        command = commands / module
        command.write_text(f'#!/bin/sh\nexec "{commands / "python"}" -m {module} "$@"\n')
        command.chmod(0o755)
    return commands


def must_run(*command, **options):
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_printed_commands(result, environment, here):
    """Run the commands that a result ends with; return what they print, and the environment variables."""
    pytest.importorskip("pip", reason="pip is not installed here")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("POLYCAST_", "PYTEST_"))}
    variables |= {
        "PATH": f"{environment}{os.pathsep}{os.environ['PATH']}",
        "POLYCAST_ENGINE": "reference",
        "PYTEST_ADDOPTS": "-p no:cacheprovider -q",
        # Nothing comes from the package index: what is needed is here.
        **{
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
    }
    return must_run("sh", "-c", result.stdout.partition("then: ")[2], env=variables, cwd=here), variables


def passed(said):
    assert "failed" not in said
    return int(said.rpartition(" passed")[0].rpartition("\n")[2])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["hpu", "acme"])
def test_the_printed_commands_install_the_package_run_its_tests_and_list_it(here, environment, device):
    said, variables = run_printed_commands(new(device), environment, here)
    assert passed(said) > 120
    listed = json.loads(must_run("polycast", "devices", "--json", env=variables, cwd=here))
    (status,) = (status for status in listed if status["device_type"] == device)
    assert (status["state"], status["distribution"]) == ("unavailable", f"polycast-{device}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "least"),
    [(EXTEND, 12), (("new-backend", "--extend", "xpu"), 4), (PLUGIN, 2)],
    ids=["extension", "extension of an absent device", "plugin"],
)
def test_the_printed_commands_install_an_extension_or_a_plugin_and_run_its_tests(here, environment, command, least):
    said, _ = run_printed_commands(new("acme-odd", command=command), environment, here)
    assert passed(said) >= least


def test_the_package_is_formatted_and_lints_without_errors(here):
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed here")
    for device in ("acme", "hpu"):
        new(device)
    new("acme-odd", command=EXTEND)
    new("acme-odd-plugin", command=PLUGIN)
    must_run(ruff, "format", "--isolated", "--line-length=120", "--check", ".", cwd=here)
    must_run(ruff, "check", "--isolated", "--line-length=120", "--select=E,F,W,I,UP,B,RUF", ".", cwd=here)
