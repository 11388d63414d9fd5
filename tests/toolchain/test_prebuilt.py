"""Prebuilt libraries: which one fits, and a wheel that contains one."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from polycast.engine.native import loading
from polycast.engine.native.loading import ENGINE
from polycast.toolchain import prebuilt
from polycast.toolchain.compiler import checksum, digest_of_headers, find_compiler, headers_of_torch
from polycast.toolchain.cpp_library import CppLibrary
from polycast.toolchain.prebuilt import find_prebuilt

TOOL = Path(__file__).parents[2] / "tools" / "platform_wheel.py"


def put_into(folder, library):
    """Copy a library to the folder of prebuilt ones for the running torch."""
    place = folder / prebuilt._key(ENGINE.read_sources()) / library.name
    place.parent.mkdir(parents=True)
    shutil.copy(library, place)
    place.with_suffix(".sha256").write_text(checksum(place))
    return place


@pytest.fixture
def came_with(library, tmp_path, monkeypatch):
    monkeypatch.setattr(prebuilt, "_FOLDER", tmp_path / "prebuilt")
    return put_into(tmp_path / "prebuilt", library)


def running(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))


def test_the_library_for_the_running_torch_is_found(came_with):
    assert find_prebuilt(ENGINE) == came_with


def test_a_library_fits_all_official_builds_of_a_version(came_with, monkeypatch):
    public = torch.__version__.partition("+")[0]
    for local in ("", "+cpu", "+cu126", "+cu130"):
        running(monkeypatch, public + local)
        assert find_prebuilt(ENGINE) == came_with


@pytest.mark.parametrize("version", ["2.10.0", "2.99.0+cpu", "2.13.0+git1a2b3c4", "2.13.0a0", "2.13.0.dev20260101+cpu"])
def test_no_library_fits_another_version_or_an_unofficial_build(came_with, monkeypatch, version):
    running(monkeypatch, version)
    assert find_prebuilt(ENGINE) is None


HEADERS = ["ATen/core/TensorBase.h", "c10/core/TensorImpl.h"]


@pytest.fixture
def with_headers(came_with):
    """The library, with the digest of the headers that it was compiled from."""
    came_with.with_suffix(".headers").write_text("\n".join([digest_of_headers(HEADERS), *HEADERS]))
    prebuilt._has_the_headers.cache_clear()
    yield came_with
    prebuilt._has_the_headers.cache_clear()


def of_patch(number):
    major, minor, _ = torch.__version__.partition("+")[0].split(".")
    return f"{major}.{minor}.{number}"


def test_a_library_fits_another_patch_release_with_the_same_headers(with_headers, monkeypatch):
    for version in (of_patch(7), of_patch(8) + "+cpu"):
        running(monkeypatch, version)
        assert find_prebuilt(ENGINE) == with_headers


@pytest.mark.parametrize("change", ["header_differs", "header_is_missing", "no_list"])
def test_no_library_fits_another_patch_release_with_other_headers(with_headers, monkeypatch, change):
    headers = with_headers.with_suffix(".headers")
    if change == "no_list":
        headers.unlink()
    else:
        other = "c10/core/Device.h" if change == "header_differs" else "c10/core/absent.h"
        headers.write_text("\n".join([digest_of_headers(HEADERS), HEADERS[0], other]))
    running(monkeypatch, of_patch(7))
    assert find_prebuilt(ENGINE) is None


def test_no_library_fits_another_minor_release_even_with_the_same_headers(with_headers, monkeypatch):
    running(monkeypatch, "2.99.0")
    assert find_prebuilt(ENGINE) is None


def test_the_headers_of_torch_that_a_library_is_compiled_from_are_listed(tmp_path):
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no compiler here")
    library, source = CppLibrary.of_ops("acme"), b"#include <c10/core/Device.h>\n#include <vector>\n"
    headers = headers_of_torch(compiler, library, {"acme.cpp": source}, tmp_path)
    assert {"c10/core/Device.h", "c10/core/DeviceType.h"} <= set(headers)
    assert [header for header in headers if not (Path(torch.__file__).parent / "include" / header).is_file()] == []
    assert digest_of_headers(headers) == digest_of_headers(list(headers))


def test_a_wheel_that_is_too_large_is_removed(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("platform_wheel", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    wheel = tmp_path / "polycast-0.1.0-cp310-abi3-linux_x86_64.whl"
    wheel.write_bytes(b"x" * 100)
    monkeypatch.setattr(tool, "MAX_BYTES", 100)
    tool.check_size(wheel)
    assert wheel.exists()
    monkeypatch.setattr(tool, "MAX_BYTES", 99)
    with pytest.raises(SystemExit, match=r"has 100 bytes, more than 99: build it for fewer versions of torch\."):
        tool.check_size(wheel)
    assert not wheel.exists()


def test_no_library_fits_other_sources(came_with, monkeypatch):
    sources = ENGINE.read_sources()
    monkeypatch.setattr(CppLibrary, "read_sources", lambda _: {**sources, "parallel.h": b"// another"})
    assert find_prebuilt(ENGINE) is None


@pytest.mark.parametrize("damage", ["truncated", "no_checksum"])
def test_a_damaged_library_is_ignored(came_with, damage):
    if damage == "truncated":
        os.truncate(came_with, 1000)
    else:
        came_with.with_suffix(".sha256").unlink()
    assert find_prebuilt(ENGINE) is None


def test_a_library_that_does_not_load_is_ignored(came_with):
    came_with.write_bytes(b"for another machine")
    came_with.with_suffix(".sha256").write_text(checksum(came_with))
    loading._load_prebuilt.cache_clear()
    try:
        assert find_prebuilt(ENGINE) == came_with
        assert loading._load_prebuilt() is None
    finally:
        loading._load_prebuilt.cache_clear()


def test_without_a_compiler_the_error_names_the_versions_of_torch_that_have_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(prebuilt, "_FOLDER", tmp_path)
    running(monkeypatch, "2.99.0")
    assert str(prebuilt.no_compiler()) == (
        "no C++ compiler is found, and polycast came without compiled libraries, which its wheels for Linux contain. "
        "Install a compiler (c++; on Debian: apt install g++), or name it in the variable CXX."
    )
    for version in ("2.9.1", "2.13.0", "2.11.0"):
        (tmp_path / f"torch-{version}-linux-x86_64-0123456789abcdef").mkdir()
    assert "the libraries that came with polycast are for torch 2.9.1, 2.11.0, 2.13.0, and this is torch 2.99.0" in str(
        prebuilt.no_compiler()
    )


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
        for package in ("polycast", "polycast_cpu"):
            root = Path(importlib.util.find_spec(package).origin).parent
            for path in root.rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.write(path, path.relative_to(root.parent).as_posix())
        info = "polycast-0.1.0.dist-info"
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: polycast\nVersion: 0.1.0\n")
        archive.writestr(f"{info}/entry_points.txt", "[polycast.backends]\ncpu = polycast_cpu\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


WRITE = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
import platform_wheel
pure, = folder.glob("*-none-any.whl")
print(platform_wheel.write_wheel(pure, folder / "engines", folder, "linux_x86_64"))
"""


@pytest.mark.slow
def test_a_wheel_with_an_engine_needs_no_compiler_and_writes_nothing(pure_wheel, library, tmp_path):
    put_into(tmp_path / "engines", library)
    command = [sys.executable, "-c", WRITE, str(tmp_path), str(TOOL.parent)]
    made = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
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
    assert list(home.iterdir()) == []
