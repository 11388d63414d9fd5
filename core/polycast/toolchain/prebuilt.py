"""Libraries that were built beforehand and come with the package, for each version of torch that a wheel is for.

One fits if it was built for the running torch, from the source that is here: between two versions the layouts differ of
what torch's headers show. Between the builds of one version, for the CPU and for each CUDA, none does. It serves every
Python that has the limited API. Whoever can write where it lies can write polycast too, so only its checksum is looked
at, for a file that was cut short or changed.

``python -m polycast.toolchain.prebuilt FOLDER [PACKAGE ...]`` builds the engine and its observer for
the running torch, and the ops of backends' packages; tools/platform_wheel.py puts them into a wheel.
"""

import hashlib
import re
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from .build_cache import BuildError
from .compiler import PYTHON, checksum, compile_library, find_compiler, read_sources
from .library import Library

_FOLDER = Path(__file__).parent / "prebuilt"
_LINKING = ("-s", "-Wl,--gc-sections", "-Wl,-z,noseparate-code") if sys.platform == "linux" else ()  # for its size
_SAME_LAYOUT = re.compile(r"(?:\+(?:cpu|cu\d+))?")  # the local part of a version: torch's own builds


def find(wanted: Library) -> Path | None:
    """Return the library that came with the package and fits, or None."""
    key = _key(read_sources(wanted))
    library = None if key is None else _FOLDER / key / f"{wanted.name}.so"
    try:
        whole = library is not None and library.with_suffix(".sha256").read_text() == checksum(library)
    except (OSError, UnicodeDecodeError):
        return None
    return library if whole else None


def origin(library: Path) -> str:
    """Say where one came from, in words."""
    return f"came with polycast: {library}"


def make(folder: Path, wanted: Library) -> Path:
    """Build the one for the running torch, in a folder for its key.

    Raises:
        BuildError: it cannot be built, or would fit no other build of this torch.
    """
    sources = read_sources(wanted)
    key, compiler = _key(sources), find_compiler()
    if key is None:
        raise BuildError(f"torch {torch.__version__} on this Python is none that engines are built beforehand for.")
    if compiler is None:
        raise BuildError("no C++ compiler is found. Install one (c++), or name it in the variable CXX.")
    library = folder / key / f"{wanted.name}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / library.name
        status, output = compile_library(compiler, wanted, sources, built, _LINKING)
        if status != 0:
            raise BuildError(f"the compiler failed with status {status}: {output}")
        library.write_bytes(built.read_bytes())
    library.with_suffix(".sha256").write_text(checksum(library))
    return library


def _key(sources: Mapping[str, bytes]) -> str | None:
    """Return what an engine is found by: torch's version, the platform and the source; None: none can fit."""
    version = re.fullmatch(rf"(\d+\.\d+\.\d+){_SAME_LAYOUT.pattern}", str(torch.__version__))
    if version is None or PYTHON != "abi3" or not torch.compiled_with_cxx11_abi():
        return None
    source = hashlib.sha256(b"\0".join(part for name, text in sources.items() for part in (name.encode(), text)))
    return f"torch-{version[1]}-{sysconfig.get_platform()}-{source.hexdigest()[:16]}"
