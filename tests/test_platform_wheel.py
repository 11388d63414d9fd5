"""Wheels that contain libraries for this platform: their size, their tag, and that they need no compiler."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain.build import get_or_build
from polycast.toolchain.cache_folder import cache_directory
from polycast_plugins.cli.build import libraries

from .core.toolchain.test_prebuilt import HEADERS, put_into
from .core.toolchain.tools import load_tool

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture
def library():
    return get_or_build(cache_directory(), ENGINE)


@pytest.fixture
def tool():
    return load_tool("platform_wheel")


@pytest.mark.slow
def test_a_wheel_with_libraries_for_each_torch_has_the_size_that_is_allowed(tool, pure_wheel, tmp_path):
    """Libraries for several versions share what is equal in them, so the real wheel is smaller."""
    if shutil.which("strip") is None:
        pytest.skip("strip is not installed: prebuilt libraries have no symbols")
    tomllib = pytest.importorskip("tomllib", reason="tomllib is new in Python 3.11")
    torches = {row["torch"] for row in tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["polycast"]["matrix"]}
    for library in libraries():
        place = tmp_path / "engines" / "torch" / f"{library.name}.so"
        place.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["strip", "-o", place, get_or_build(cache_directory(), library)], check=True)
        place.with_suffix(".headers").write_text("\n".join(HEADERS))
    archives = dict(tool.archives_of(tmp_path / "engines"))
    assert len(archives) == 2 * len(libraries())
    made = tool.write_wheel(pure_wheel, archives.items(), tmp_path, "linux_x86_64")
    for_the_other_torches = (len(torches) - 1) * sum(map(len, archives.values()))
    assert made.stat().st_size + for_the_other_torches <= tool.MAX_BYTES


def test_the_wheel_is_for_the_oldest_linux_that_auditwheel_allows(tool, pure_wheel, tmp_path, monkeypatch):
    (tmp_path / "engines" / "torch-2.13.0").mkdir(parents=True)
    (tmp_path / "engines" / "torch-2.13.0" / "acme.so").write_bytes(b"\x7fELF")
    seen = []

    def run(command, **options):
        seen.extend(zipfile.ZipFile(command[-1]).namelist())
        text = 'polycast is consistent with ...\n\nThis constrains the platform tag to\n"manylinux_2_28_x86_64".'
        return subprocess.CompletedProcess(command, 0, stdout=text)

    monkeypatch.setattr(subprocess, "run", run)
    assert tool.oldest_linux(pure_wheel, tmp_path / "engines", "linux_x86_64") == "manylinux_2_28_x86_64"
    assert "torch-2.13.0/acme.so" in seen  # as auditwheel finds it


def test_a_wheel_that_is_too_large_is_removed(tool, tmp_path, monkeypatch):
    wheel = tmp_path / "polycast-0.1.0-cp310-abi3-linux_x86_64.whl"
    wheel.write_bytes(b"x" * 100)
    monkeypatch.setattr(tool, "MAX_BYTES", 100)
    tool.check_size(wheel)
    assert wheel.exists()
    monkeypatch.setattr(tool, "MAX_BYTES", 99)
    with pytest.raises(SystemExit, match=r"has 100 bytes, more than 99: build it for fewer versions of torch\."):
        tool.check_size(wheel)
    assert not wheel.exists()


SCRIPT = """
import torch, polycast
from polycast.engine.choice import chosen
with polycast.autocast("cpu"):
    print(torch.nn.Linear(4, 4)(torch.ones(1, 4)).dtype)
print(chosen().name, "came with polycast" in chosen().origin, polycast.__file__)
"""


@pytest.fixture
def pure_wheel(tmp_path):
    """A wheel of the package, with the files that the tool reads."""
    wheel = tmp_path / "polycast-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for package in ("polycast", "polycast_backends.cpu", "polycast_plugins.quantize"):
            root = Path(importlib.util.find_spec(package).origin).parent
            for path in root.rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.write(path, Path(*package.split(".")) / path.relative_to(root))
        info = "polycast-0.1.0.dist-info"
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: polycast\nVersion: 0.1.0\n")
        archive.writestr(f"{info}/entry_points.txt", "[polycast.backends]\ncpu = polycast_backends.cpu\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.mark.slow
def test_a_wheel_with_an_engine_needs_no_compiler(tool, pure_wheel, library, tmp_path):
    put_into(tmp_path / "engines", library)
    made = tool.write_wheel(pure_wheel, tool.archives_of(tmp_path / "engines"), tmp_path, "linux_x86_64")
    assert made.name == "polycast-0.1.0-cp310-abi3-linux_x86_64.whl"
    installed, home = tmp_path / "installed", tmp_path / "home"
    home.mkdir()
    with zipfile.ZipFile(made) as archive:
        archive.extractall(installed)
    names = ("PATH", "XDG_CACHE_HOME", "CXX", "POLYCAST_ENGINE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PATH": "/nowhere", "HOME": str(home), "PYTHONPATH": str(installed)}
    environment["PYTHONWARNINGS"] = "error::UserWarning,ignore:bfloat16 is slow on"
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"torch.bfloat16\nnative True {installed}/polycast/__init__.py\n", "")
    assert [path.name for path in home.rglob("*") if path.is_file()] == ["polycast_native.so"]
