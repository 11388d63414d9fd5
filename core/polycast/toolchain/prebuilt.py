"""Prebuilt libraries, which come with the package for each version of torch that a wheel supports.

A library fits if it was built from the installed sources for the running version of torch: the layouts in torch's
headers differ between versions, but not between the builds of one version, for the CPU and for each CUDA. It serves
every Python that has the limited API. Anyone who can write it can write polycast too, so only its checksum is checked,
which detects truncated files.
"""

import hashlib
import re
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from .compiler import PYTHON_ABI, checksum, compile_library, find_compiler
from .cpp_library import BuildError, CppLibrary

_FOLDER = Path(__file__).parent / "prebuilt"
_LINKER_FLAGS = ("-s", "-Wl,--gc-sections", "-Wl,-z,noseparate-code") if sys.platform == "linux" else ()  # small files
_OFFICIAL_VERSION = re.compile(r"(\d+\.\d+\.\d+)(?:\+(?:cpu|cu\d+))?")
"""A version of torch as its own builds have it."""
_BUILT_FOR = re.compile(r"torch-(\d+\.\d+\.\d+)-")
"""The beginning of a key."""


def find_prebuilt(library: CppLibrary) -> Path | None:
    """Return the path of the prebuilt library that fits, or None."""
    key = _key(library.read_sources())
    path = None if key is None else _FOLDER / key / f"{library.name}.so"
    try:
        complete = path is not None and path.with_suffix(".sha256").read_text() == checksum(path)
    except (OSError, UnicodeDecodeError):
        return None
    return path if complete else None


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
    path.with_suffix(".sha256").write_text(checksum(path))
    return path


def _key(sources: Mapping[str, bytes]) -> str | None:
    """Return a key of torch's version, the platform and the sources; None if no prebuilt library can fit."""
    version = _OFFICIAL_VERSION.fullmatch(str(torch.__version__))
    if version is None or PYTHON_ABI != "abi3" or not torch.compiled_with_cxx11_abi():
        return None
    source = hashlib.sha256(b"\0".join(part for name, text in sources.items() for part in (name.encode(), text)))
    return f"torch-{version[1]}-{sysconfig.get_platform()}-{source.hexdigest()[:16]}"
