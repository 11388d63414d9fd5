"""Prebuilt libraries: which one fits, and a wheel that contains one."""

import dataclasses
import json
import os
import random
import re
import shutil
import stat

import pytest
import torch

from polycast.engine.native import engine_library
from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain import prebuilt
from polycast.toolchain.cache_folder import UntrustedCacheError
from polycast.toolchain.compiler import checksum, digest_of_headers
from polycast.toolchain.cpp_library import BuildError, CppLibrary
from polycast.toolchain.load import load_prebuilt
from polycast.toolchain.prebuilt import Prebuilt, find_prebuilt, key_of

from .tools import load_tool

HEADERS = ["ATen/core/TensorBase.h", "c10/core/TensorImpl.h"]


def put_into(folder, library, headers=()):
    """Put a library, with headers that it was compiled from, into a folder of builds."""
    place = folder / key_of(ENGINE.read_sources()) / library.name
    place.parent.mkdir(parents=True)
    shutil.copy(library, place)
    place.with_suffix(".headers").write_text("\n".join([digest_of_headers(headers), *headers]))


@pytest.fixture
def archives(tmp_path, monkeypatch):
    """The folder of archives, and an empty cache."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(prebuilt, "_FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prebuilt._has_the_headers.cache_clear()
    yield folder
    prebuilt._has_the_headers.cache_clear()


@pytest.fixture
def came_with(tmp_path, archives):
    """Pack a small file as the library for the running torch."""
    library = tmp_path / f"{ENGINE.name}.so"
    library.write_bytes(b"for another machine")
    put_into(tmp_path / "builds", library, HEADERS)
    for name, content in load_tool("platform_wheel").pack(tmp_path / "builds"):
        (archives / name).write_bytes(content)
    return Prebuilt(archives / f"{ENGINE.name}.tar.xz", key_of(ENGINE.read_sources()), checksum(library))


def running(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))


PUBLIC = torch.__version__.partition("+")[0]
PATCHED = [f"{PUBLIC.rpartition('.')[0]}.{patch}" for patch in (7, 8)]
VERSIONS = [
    *((PUBLIC + local, True) for local in ("", "+cpu", "+cu126", "+cu130")),
    *((version, True) for version in (PATCHED[0], PATCHED[1] + "+cpu")),  # with the same headers
    *((version, False) for version in ("2.10.0", "2.99.0", "2.99.0+cpu")),
    *((version, False) for version in ("2.13.0+git1a2b3c4", "2.13.0a0", "2.13.0.dev20260101+cpu")),
]


@pytest.mark.parametrize(("version", "fits"), VERSIONS)
def test_a_library_fits_the_official_builds_of_a_version(came_with, monkeypatch, version, fits):
    running(monkeypatch, version)
    assert find_prebuilt(ENGINE) == (came_with if fits else None)


def test_no_library_fits_another_patch_release_with_other_headers(came_with, monkeypatch):
    running(monkeypatch, PATCHED[0])
    for headers in (HEADERS[:1], [*HEADERS, "c10/core/absent.h"], []):
        prebuilt._has_the_headers.cache_clear()
        monkeypatch.setattr(prebuilt, "digest_of_headers", lambda _, other=headers: digest_of_headers(other))
        assert find_prebuilt(ENGINE) is None


def test_no_library_fits_other_sources(came_with, monkeypatch):
    sources = ENGINE.read_sources()
    monkeypatch.setattr(CppLibrary, "read_sources", lambda _: {**sources, "parallel.h": b"// another"})
    assert find_prebuilt(ENGINE) is None


def test_a_library_is_unpacked_into_the_cache_once(came_with, tmp_path):
    path = came_with.unpack_into(tmp_path / "cache")
    assert (path.name, path.read_bytes()) == ("polycast_native.so", b"for another machine")
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == [path]
    came_with.archive.unlink()
    assert came_with.unpack_into(tmp_path / "cache") == path


def test_a_damaged_library_in_the_cache_is_unpacked_again(came_with, tmp_path):
    path = came_with.unpack_into(tmp_path / "cache")
    os.truncate(path, 5)
    assert came_with.unpack_into(tmp_path / "cache").read_bytes() == b"for another machine"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_a_library_that_others_can_write_is_unpacked_again(came_with, tmp_path):
    path = came_with.unpack_into(tmp_path / "cache")
    path.chmod(0o666)
    assert stat.S_IMODE(came_with.unpack_into(tmp_path / "cache").stat().st_mode) == 0o600
    path.parent.chmod(0o777)
    with pytest.raises(UntrustedCacheError, match=r"can be written by others"):
        came_with.unpack_into(tmp_path / "cache")


@pytest.mark.parametrize("damage", ["truncated", "missing", "another"])
def test_a_damaged_archive_is_told(came_with, tmp_path, damage):
    path = came_with.archive
    if damage == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "missing":
        path.unlink()
    else:
        came_with = dataclasses.replace(came_with, key="torch-2.13.0-another")
    with pytest.raises(BuildError, match=rf"{path} (cannot be read|is damaged)"):
        came_with.unpack_into(tmp_path / "cache")


def test_the_libraries_for_several_versions_share_what_is_equal(tmp_path):
    library = tmp_path / "polycast_native.so"
    library.write_bytes(random.Random(0).randbytes(100_000))
    for version in range(5):
        folder = tmp_path / "builds" / f"torch-2.{version}.0-linux-x86_64-0123456789abcdef"
        folder.mkdir(parents=True)
        (folder / library.name).write_bytes(library.read_bytes() + bytes([version]))
        (folder / "polycast_native.headers").write_text("")
    packed = dict(load_tool("platform_wheel").pack(tmp_path / "builds"))
    assert 100_000 < len(packed["polycast_native.tar.xz"]) < 110_000


@pytest.fixture
def unloaded():
    engine_library._load_prebuilt.cache_clear()
    yield
    engine_library._load_prebuilt.cache_clear()


def test_a_library_that_does_not_load_is_ignored(came_with, unloaded):
    assert find_prebuilt(ENGINE) == came_with
    assert engine_library._load_prebuilt() is None
    assert re.search(r"a library that came with polycast does not load here \(\w+: .*\)\.", str(prebuilt.no_compiler()))


def test_a_library_is_loaded_without_a_cache(came_with, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    opened = []
    assert load_prebuilt(ENGINE, lambda path: opened.append((path, path.read_bytes()))) == (
        None,
        f"came with polycast: {came_with.archive}",
    )
    [(path, content)] = opened
    assert content == b"for another machine"
    assert not path.parent.exists()


def test_without_a_compiler_the_error_names_the_versions_of_torch_that_have_libraries(archives, monkeypatch):
    running(monkeypatch, "2.99.0")
    assert str(prebuilt.no_compiler()) == (
        "no C++ compiler is found, and polycast came without compiled libraries, which its wheels for Linux contain. "
        "Install a compiler (c++; on Debian: apt install g++), or name it in the variable CXX."
    )
    keys = [f"torch-{version}-linux-x86_64-0123456789abcdef" for version in ("2.9.1", "2.13.0", "2.11.0")]
    (archives / "polycast_native.json").write_text(json.dumps(dict.fromkeys(keys, "a checksum")))
    (archives / "polycast_native.tar.xz").touch()
    assert "the libraries that came with polycast are for torch 2.9.1, 2.11.0, 2.13.0, and this is torch 2.99.0" in str(
        prebuilt.no_compiler()
    )
