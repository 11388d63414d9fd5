"""``polycast new-backend``: the package that it writes installs and passes its tests; a refusal leaves no files."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polycast_plugins.cli import app, new_backend

FILES = {
    "README.md",
    "pyproject.toml",
    "polycast_acme/__init__.py",
    "polycast_acme/policies.py",
    "polycast_acme/py.typed",
    "tests/expected_failures.txt",
    "tests/test_conformance.py",
}


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An empty working directory."""
    path = tmp_path / "here"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def new(*arguments):
    return CliRunner().invoke(app, ["new-backend", *map(str, arguments)])


def written(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_only_the_package(here):
    result = new("acme")
    then = "pip install './polycast-acme[test]' && pytest ./polycast-acme"
    assert (result.exit_code, result.stdout) == (0, f"polycast-acme: the backend of acme. Edit it, then: {then}\n")
    assert written(here) == {f"polycast-acme/{name}" for name in FILES}


@pytest.mark.parametrize(
    ("version", "required"),
    [("0.1.0", ">=0.1.0,<0.4"), ("1.12.3", ">=1.12.3,<1.15"), ("0.2.0.dev1", ">=0.2.0.dev1,<0.5")],
)
def test_it_requires_the_versions_that_keep_what_it_uses(here, monkeypatch, version, required):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    new("acme")
    assert f'"polycast{required}"' in (here / "polycast-acme/pyproject.toml").read_text()
    assert "    api = 1" in (here / "polycast-acme/polycast_acme/__init__.py").read_text()


@pytest.mark.parametrize(
    ("directory", "then"),
    [
        (".", "pip install '.[test]' && pytest ."),
        ("deep/down", "pip install './deep/down[test]' && pytest ./deep/down"),
        ("../beside", "pip install '../beside[test]' && pytest ../beside"),
        ("-of mine", "pip install './-of mine[test]' && pytest './-of mine'"),
    ],
)
def test_the_printed_commands_quote_the_folder(here, directory, then):
    assert new("acme", f"--directory={directory}").stdout.partition("then: ")[2] == f"{then}\n"


@pytest.mark.parametrize("existing", [True, False])
def test_it_writes_into_the_given_folder(here, existing):
    target = here / "deep" / "down"
    if existing:
        target.mkdir(parents=True)
    assert new("acme", "--directory", target).exit_code == 0
    assert written(here) == {f"deep/down/{name}" for name in FILES}


def test_it_writes_into_the_empty_working_directory(here):
    before = os.stat(here).st_ino
    assert new("acme", "--directory", ".").exit_code == 0
    assert (written(here), os.stat(".").st_ino) == (FILES, before)


def test_only_a_device_without_a_name_in_torch_renames_privateuse1(here):
    new("hpu")
    new("acme_npu")
    rename = 'torch.utils.rename_privateuse1_backend("{}")'
    assert "rename" not in (here / "polycast-hpu/polycast_hpu/__init__.py").read_text()
    assert rename.format("acme_npu") in (here / "polycast-acme-npu/polycast_acme_npu/__init__.py").read_text()


def test_ops_missing_from_torchs_list_for_accelerators_are_expected_failures(here):
    new("mps")
    lines = (here / "polycast-mps/tests/expected_failures.txt").read_text().splitlines()
    assert "aten::batch_norm  has no policy in policies.py yet: torch's own kernel runs" in lines


def test_the_name_of_the_distribution_ends_in_a_letter(here):
    """pip refuses a name that ends in an underscore."""
    assert new("acme_").exit_code == 0
    assert 'name = "polycast-acme"\n' in (here / "polycast-acme/pyproject.toml").read_text()


MODULE = "{!r} cannot be part of a Python module's name. Name the device as torch does: letters, such as npu."


INVALID = [
    ("", MODULE.format("")),
    ("class", MODULE.format("class")),
    ("my-npu", MODULE.format("my-npu")),
    ("../npu", MODULE.format("../npu")),
    ("npu:0", MODULE.format("npu:0")),
    ("_npu", MODULE.format("_npu")),
    ("nπu", MODULE.format("nπu")),
    ("NPU", "'NPU' is not in lower case, as device types of torch are. Write npu."),
    ("npu2", "torch does not accept 'npu2' as a device: Invalid device string: 'npu2'. Use letters and und"),
    ("meta", "torch has no Autocast dispatch key for 'meta', so it can have no backend."),
]


def test_an_invalid_device_name_is_refused(here, subtests):
    for name, message in INVALID:
        with subtests.test(name=name, message=message):
            result = new(name)
            assert result.exit_code == 2
            assert result.stderr.startswith(f"polycast: {message}")
            assert list(here.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_existing_files_are_not_overwritten(here, kind):
    target = here / "polycast-acme"
    file = target if kind == "file" else target / "mine"
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    result = new("acme")
    message = "polycast-acme exists and is not an empty directory. Choose another one with --directory."
    assert (result.exit_code, result.stderr) == (2, f"polycast: {message}\n")
    assert [path.read_text() for path in here.rglob("*") if path.is_file()] == ["mine"]


def test_a_folder_that_cannot_be_written_is_refused(here):
    (here / "file").write_text("mine")
    result = new("acme", "--directory", here / "file" / "below")
    assert result.exit_code == 2
    assert "below cannot be written: " in result.stderr
    assert written(here) == {"file"}


@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_removes_the_files_written_so_far(here, monkeypatch, existing):
    target = here / "target"
    if existing:
        target.mkdir()
    rename, renames = Path.rename, []

    def second_fails(path, to):
        renames.append(path)
        if len(renames) == (2 if existing else 1):
            raise OSError("the disk is full")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", second_fails)
    result = new("acme", "--directory", target)
    assert (result.exit_code, result.stderr.rpartition(": ")[2]) == (2, "the disk is full\n")
    assert [path.name for path in here.rglob("*")] == (["target"] if existing else [])


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


@pytest.mark.slow
@pytest.mark.parametrize("device", ["hpu", "acme"])
def test_the_printed_commands_install_the_package_run_its_tests_and_list_it(here, environment, device):
    pytest.importorskip("pip", reason="pip is not installed here")
    then = new(device).stdout.partition("then: ")[2]
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
    said = must_run("sh", "-c", then, env=variables, cwd=here)
    passed = int(said.rpartition(" passed")[0].rpartition("\n")[2])
    assert passed > 120
    assert "failed" not in said
    listed = json.loads(must_run("polycast", "devices", "--json", env=variables, cwd=here))
    (status,) = (status for status in listed if status["device_type"] == device)
    assert (status["state"], status["distribution"]) == ("unavailable", f"polycast-{device}")


def test_every_template_is_used():
    files = {path.name.removesuffix(".template") for path in new_backend._TEMPLATES.rglob("*") if path.is_file()}
    assert files == {Path(name).name for name in FILES} | {"naming"}


def test_the_package_is_formatted_and_lints_without_errors(here):
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed here")
    for device in ("acme", "hpu"):
        new(device)
    must_run(ruff, "format", "--isolated", "--line-length=120", "--check", ".", cwd=here)
    must_run(ruff, "check", "--isolated", "--line-length=120", "--select=E,F,W,I,UP,B,RUF", ".", cwd=here)
