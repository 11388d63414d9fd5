"""Prebuilt libraries, which come with the package for each version of torch that a wheel supports.

A library fits if it was built from the installed sources for the running version of torch: the layouts in torch's
headers differ between versions, but not between the builds of one version, for the CPU and for each CUDA. It also fits
another patch release if the headers that it was compiled from are the same there. It serves every Python that has the
limited API. Anyone who can write it can write polycast too, so only its checksum is checked,
which detects truncated files.
"""

import functools
import hashlib
import re
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from .compiler import (
    PYTHON_ABI,
    checksum,
    compile_library,
    digest_of_headers,
    find_compiler,
    headers_of_torch,
)
from .cpp_library import BuildError, CppLibrary

_FOLDER = Path(__file__).parent / "prebuilt"
_LINKER_FLAGS = ("-s", "-Wl,--gc-sections", "-Wl,-z,noseparate-code") if sys.platform == "linux" else ()  # small files
_OFFICIAL_VERSION = re.compile(r"(\d+\.\d+\.\d+)(?:\+(?:cpu|cu\d+))?")
"""A version of torch as its own builds have it."""
_BUILT_FOR = re.compile(r"torch-(\d+\.\d+\.\d+)-")
"""The beginning of a key."""


def find_prebuilt(library: CppLibrary) -> Path | None:
    """Return the path of the prebuilt library that fits, or None."""
    sources = library.read_sources()
    key = _key(sources)
    if key is None:
        return None
    path = _FOLDER / key / f"{library.name}.so"
    if not path.parent.is_dir():
        others = _FOLDER.glob(f"{_key(sources, any_patch=True)}/{library.name}.so")
        path = next((other for other in sorted(others) if _has_the_headers(other)), path)
    try:
        complete = path.with_suffix(".sha256").read_text() == checksum(path)
    except (OSError, UnicodeDecodeError):
        return None
    return path if complete else None


@functools.cache
def _has_the_headers(path: Path) -> bool:
    """Return whether the headers that a library was compiled from are those of the installed torch."""
    try:
        digest, *headers = path.with_suffix(".headers").read_text().split()
    except (OSError, ValueError):
        return False
    return digest_of_headers(headers) == digest


def no_compiler() -> BuildError:
    """Return the error that there is no C++ compiler, and no prebuilt library for the running torch."""
    versions = {match[1] for path in _FOLDER.glob("torch-*") if (match := _BUILT_FOR.match(path.name))}
    if versions:
        known = ", ".join(sorted(versions, key=TorchVersion))
        prebuilt = f"the libraries that came with polycast are for torch {known}, and this is torch {torch.__version__}"
    else:
        prebuilt = "polycast came without compiled libraries, which its wheels for Linux contain"
    return BuildError(
        f"no C++ compiler is found, and {prebuilt}. Install a compiler (c++; on Debian: apt install g++), or name "
        "it in the variable CXX."
    )


def build_prebuilt(folder: Path, library: CppLibrary) -> Path:
    """Build a library for the running torch, in a subfolder named by its key.

    Raises:
        BuildError: it cannot be built, or would fit no other build of this torch.
    """
    sources = library.read_sources()
    key, compiler = _key(sources), find_compiler()
    if key is None:
        raise BuildError(f"libraries are not prebuilt for torch {torch.__version__} on this Python.")
    if compiler is None:
        raise no_compiler()
    path = folder / key / f"{library.name}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        compiled = Path(scratch) / path.name
        status, output = compile_library(compiler, library, sources, compiled, _LINKER_FLAGS)
        if status != 0:
            raise BuildError(f"the compiler failed with status {status}: {output}")
        path.write_bytes(compiled.read_bytes())
    with tempfile.TemporaryDirectory() as scratch:
        headers = headers_of_torch(compiler, library, sources, Path(scratch))
    path.with_suffix(".headers").write_text("\n".join([digest_of_headers(headers), *headers]))
    path.with_suffix(".sha256").write_text(checksum(path))
    return path


def _key(sources: Mapping[str, bytes], any_patch: bool = False) -> str | None:
    """Return a key of torch's version, the platform and the sources; None if no prebuilt library can fit.

    With `any_patch`, return a pattern of the keys of all patch releases.
    """
    version = _OFFICIAL_VERSION.fullmatch(str(torch.__version__))
    if version is None or PYTHON_ABI != "abi3" or not torch.compiled_with_cxx11_abi():
        return None
    source = hashlib.sha256(b"\0".join(part for name, text in sources.items() for part in (name.encode(), text)))
    release = f"{version[1].rpartition('.')[0]}.*" if any_patch else version[1]
    return f"torch-{release}-{sysconfig.get_platform()}-{source.hexdigest()[:16]}"
