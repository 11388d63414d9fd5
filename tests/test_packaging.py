"""The distribution: its metadata, what its wheel and sdist hold, and which copy of it the tests run on."""

import ast
import importlib.metadata
import importlib.resources
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import polycast

from .core.toolchain.tools import load_tool

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SOURCES = {"polycast": ROOT / "core", "polycast_backends": ROOT / "backends", "polycast_plugins": ROOT / "plugins"}
PACKAGES = [
    "polycast",
    *(
        ".".join(path.relative_to(root).parts[:-1])
        for root in (ROOT / "backends", ROOT / "plugins")
        for path in sorted(root.glob("polycast_*/*/__init__.py"))
    ),
]
DISTRIBUTION = importlib.metadata.distribution("polycast")


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_tests_run_on_the_installed_distribution(pytestconfig):
    if not pytestconfig.getoption("installed"):
        pytest.skip("any copy of polycast will do without --installed")
    imported = Path(polycast.__file__).resolve()
    assert not imported.is_relative_to(ROOT / "core")
    assert imported == Path(DISTRIBUTION.locate_file("polycast/__init__.py")).resolve()


def test_each_folder_of_a_backend_has_an_entry_point():
    found = importlib.metadata.entry_points(group="polycast.backends")
    assert {(point.name, point.value) for point in found if point.dist.name == "polycast"} == {
        (package.rpartition(".")[2], package) for package in PACKAGES if package.startswith("polycast_backends")
    }


def test_the_command_is_installed():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="polycast")
    assert command.value == "polycast_plugins.cli:main"
    assert callable(command.load())


def test_the_requirements_of_each_extra():
    requirements = {}
    for line in DISTRIBUTION.requires:
        requirement, _, marker = line.partition("extra == ")
        requirements.setdefault(marker.strip("\"'"), []).append(requirement.rstrip("; "))
    assert set(requirements[""]) == {"torch>=2.11", "filelock>=3.12", "pluggy>=1.5", "typing-extensions>=4.10"}
    assert requirements["all"] == ["polycast[cli]", "polycast[files]"]
    assert requirements["cli"] == ["polycast[report]", "typer>=0.16"]
    assert {"polycast[demo]", "polycast[docs]", "polycast[serve]"} <= set(requirements["test"])
    assert "polycast[test]" in requirements["dev"]


NAMES = {"lightning": "pytorch-lightning"}
"""Modules that two distributions have, and the one that an extra requires. torch brings triton where it is used."""


def test_the_extras_together_require_each_library_that_is_imported():
    required = {re.match(r"[\w.-]+", each)[0].lower() for each in DISTRIBUTION.requires if 'extra == "dev"' not in each}
    imported = {}
    for package, root in SOURCES.items():
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module]
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "library":
                    names = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                imported |= {name.partition(".")[0]: path for name in names if isinstance(name, str)}
    libraries = imported.keys() - sys.stdlib_module_names - SOURCES.keys() - {"tomllib", "triton"}
    assert {"rich", "safetensors", "tomli_w", "torch", "typer"} <= libraries
    assert {name for name in libraries if NAMES.get(name, name).replace("_", "-") not in required} == set()


def test_each_package_says_that_it_is_typed():
    assert [each for each in PACKAGES if not (importlib.resources.files(each) / "py.typed").is_file()] == []


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    names = set(wheel.namelist())
    sources = {
        path.relative_to(root).as_posix()
        for package, root in SOURCES.items()
        for path in (root / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert {name.partition("/")[0] for name in sources} == set(SOURCES)


def test_the_wheel_carries_the_licence(wheel):
    metadata = message_from_bytes(wheel.read(f"polycast-{DISTRIBUTION.version}.dist-info/METADATA"))
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    licence = wheel.read(f"polycast-{DISTRIBUTION.version}.dist-info/licenses/LICENSE").decode()
    assert licence.startswith("MIT License\n")


def test_the_sdist_holds_what_is_needed_to_build_and_test(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    pages = {f"{name}.md" for name in ("README", "CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    assert {"pyproject.toml", "LICENSE", "Makefile", "noxfile.py", *pages, *tests} <= names
    assert not {name for name in names if name.endswith(".pyc") or name.startswith(".venv")}


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="tomllib is new in Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def torches(project):
    return [row["torch"] for row in project["tool"]["polycast"]["matrix"]]


def test_each_python_that_is_supported_is_in_the_matrix(project):
    supported = {name.rpartition(" ")[2] for name in project["project"]["classifiers"] if "Python :: 3." in name}
    assert {row["python"] for row in project["tool"]["polycast"]["matrix"]} == supported


def test_the_matrix_goes_from_the_lowest_torch_to_the_newest_and_has_the_one_that_make_installs(project, torches):
    assert f"{torches[0].replace('==', '>=').removesuffix('.*')}" in project["project"]["dependencies"]
    assert [torch for torch in torches if ">=" in torch] == [torches[-1]]
    (version,) = re.findall(r"^TORCH \?= (torch==\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"{version}.*" in torches


def test_a_wheel_has_an_engine_for_each_torch_of_the_matrix(torches):
    command = ["make", "--no-print-directory", "--eval=show:\n\t@printf '%s\\n' $(TORCHES)", "show"]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHES"}

    def shown(**variables):
        done = subprocess.run(command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True)
        return done.stdout.splitlines()

    assert shown() == sorted(set(torches))
    assert shown(TORCHES="torch==2.13.0") == ["torch==2.13.0"]


@pytest.fixture(scope="module")
def for_index():
    return load_tool("for_index")


ADDRESS = "https://forge.example/somebody/polycast"


def test_links_of_the_published_readme_are_absolute(for_index):
    published = for_index.absolute((ROOT / "README.md").read_text(encoding="utf-8"), ADDRESS, "v0.1.0")
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", published)
    links = re.findall(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)]+)\)", published)
    assert len(images) == 3
    assert len(links) > 20
    for targets, kind in ((images, "raw"), (links, "blob")):
        begin = f"{ADDRESS}/{kind}/v0.1.0/"
        assert [target for target in targets if not target.startswith(begin)] == []
        paths = [target.removeprefix(begin).partition("#")[0] for target in targets]
        assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_published_project_has_its_addresses(for_index, project):
    import tomllib

    published = for_index.with_urls((ROOT / "pyproject.toml").read_text(encoding="utf-8"), ADDRESS, "v0.1.0")
    urls = tomllib.loads(published)["project"].pop("urls")
    assert set(urls) == {"Documentation", "Repository", "Issues", "Changelog"}
    assert all(address.startswith(ADDRESS) for address in urls.values())
    rest = tomllib.loads(published)
    del rest["project"]["urls"]
    assert rest == project


def test_classifiers_are_known(project):
    known = pytest.importorskip("trove_classifiers", reason="it lists the classifiers of PyPI").classifiers
    assert [each for each in project["project"]["classifiers"] if each not in known] == []
