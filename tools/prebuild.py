"""Build a wheel's libraries for the running torch: ``python tools/prebuild.py FOLDER [PACKAGE ...]``.

They are the native engine, those of plugins, and the ops of the named backend packages. ``tools/platform_wheel.py``
adds them to a wheel. If one cannot be imported or built, the others still are, and the exit status is 1.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from polycast.plugin import NativeLibrary
from polycast.toolchain.compiler import (
    EXCERPTED_HEADERS,
    INCLUDE,
    Compiler,
    compile_command,
    compile_library,
    digest_of_headers,
    run_in,
)
from polycast.toolchain.cpp_library import BuildError, CppLibrary
from polycast.toolchain.prebuilt import key_of, require_compiler
from polycast_plugins.cli.build import common_libraries

# keep the files small
LINKER_FLAGS = ("-s", "-Wl,--gc-sections", "-Wl,-z,noseparate-code") if sys.platform == "linux" else ()


def main(folder: str, *packages: str) -> int:
    """Build the libraries in a folder, print where each is, and return the exit status."""
    problems: list[str] = []
    for library in (*common_libraries(problems), *map(NativeLibrary.of_ops, packages)):
        try:
            print(build(Path(folder), library))
        except RuntimeError as error:
            problems.append(f"{library.description} cannot be built: {error}")
    for problem in problems:
        print(f"polycast: {problem}", file=sys.stderr)
    return int(bool(problems))


def build(folder: Path, library: CppLibrary) -> Path:
    """Build a library for the running torch, in a subfolder named by its key.

    Raises:
        BuildError: it cannot be built, or would fit no other build of this torch.
    """
    sources = library.read_sources()
    key = key_of(sources)
    if key is None:
        raise BuildError(f"libraries are not prebuilt for torch {torch.__version__} on this Python.")
    compiler = require_compiler()
    path = folder / key / f"{library.name}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        compiled = Path(scratch) / path.name
        status, output = compile_library(compiler, library, sources, compiled, LINKER_FLAGS)
        if status != 0:
            raise BuildError(f"the compiler failed with status {status}: {output}")
        path.write_bytes(compiled.read_bytes())
    with tempfile.TemporaryDirectory() as scratch:
        headers = headers_of_torch(compiler, library, sources, Path(scratch))
    path.with_suffix(".headers").write_text("\n".join([digest_of_headers(headers), *headers]))
    return path


def headers_of_torch(compiler: Compiler, library: CppLibrary, sources: Mapping[str, bytes], folder: Path) -> list[str]:
    """Return the paths, in torch's include folder, of the headers that a library is compiled from, in an empty folder.

    Raises:
        BuildError: the compiler cannot list them.
    """
    done = run_in(folder, [*compile_command(compiler, library, sources, folder), "-M"])
    if done.returncode != 0:
        raise BuildError(f"the compiler lists no headers: {done.stdout}")
    include = str(INCLUDE) + os.sep
    paths = {word.removeprefix(include) for word in done.stdout.split() if word.startswith(include)}
    return sorted(paths | (set(EXCERPTED_HEADERS) if library.uses_excerpts else set()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
