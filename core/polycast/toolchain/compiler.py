"""Run the C++ compiler.

It compiles for Python's limited API, so a library serves every Python from 3.10 on. A free-threaded Python has no
limited API, and needs libraries of its own.

What only compiling needs is imported there: beside a script, a module of the user may have the name ``shlex``.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .cpp_library import BuildError, CppLibrary


class Compiler(NamedTuple):
    """A C++ compiler: its command and the output of ``--version``."""

    command: str
    version: str


# torch.utils.cpp_extension knows torch's folders too, but its import looks for CUDA and prints about it.
_TORCH = Path(torch.__file__).parent
PYTHON_ABI = EXTENSION_SUFFIXES[0].split(".")[1] if "t" in getattr(sys, "abiflags", "") else "abi3"
PLATFORM = f"{sys.platform}-{platform.machine()}"

# NDEBUG as in torch's own libraries: without it at::RecordFunction has another layout. No fused multiply-add unless the
# code asks for it: results would depend on the processor.
FLAGS = (
    "-O2",
    "-g0",
    "-DNDEBUG",
    "-fPIC",
    "-std=c++20",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-ffunction-sections",
    "-DAT_PER_OPERATOR_HEADERS",
    *(("-DPy_LIMITED_API=0x030A0000",) if PYTHON_ABI == "abi3" else ()),
)

_ERROR = re.compile(r"^.*(?:\berror: |undefined reference to ).*$", re.MULTILINE)
"""A line in which a compiler or a linker says what is wrong."""


def find_compiler() -> Compiler | None:
    """Return the C++ compiler, or None if there is none.

    Raises:
        BuildError: the compiler that CXX names cannot be run.
    """
    import shlex

    command = os.environ.get("CXX", "c++")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BuildError(f"CXX={command!r} is not a command: {error}. Correct or unset the variable.") from error
    if not words or shutil.which(words[0]) is None:
        return None
    try:
        return Compiler(command, _run([*words, "--version"], stderr=subprocess.DEVNULL).stdout)
    except OSError as error:
        raise BuildError(f"the C++ compiler {command!r} does not run: {error}. Name another in CXX.") from error


def compile_library(
    compiler: Compiler, library: CppLibrary, sources: Mapping[str, bytes], path: Path, linker_flags: Sequence[str] = ()
) -> tuple[int, str]:
    """Compile a library to a path in an otherwise empty folder; return the compiler's status and output.

    Raises:
        BuildError: torch's headers are missing, or differ from those that polycast knows.
    """
    import shlex

    compile_ = _compile_command(compiler, library, sources, path.parent)
    libraries = (f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
    # The process that loads the library provides Python's symbols; macOS's linker has to be told.
    undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    link = ["-shared", *undefined, *linker_flags, *libraries, "-o", str(path)]
    steps = [[*compile_, *link]]
    if shutil.which("ccache") is not None and "ccache" not in compiler.command:  # it caches objects, not libraries
        steps = [["ccache", *compile_, "-c", "-o", "unit.o"], [*shlex.split(compiler.command), "unit.o", *link]]
    output = ""
    for step in steps:
        done = _run_in(path.parent, step)
        output += f"{shlex.join(step)}\n{done.stdout}"
        if done.returncode != 0:
            break
    return done.returncode, output


def headers_of_torch(compiler: Compiler, library: CppLibrary, sources: Mapping[str, bytes], folder: Path) -> list[str]:
    """Return the paths, in torch's include folder, of the headers that a library is compiled from.

    Args:
        compiler, library, sources: as for :func:`compile_library`.
        folder: an empty folder.

    Raises:
        BuildError: the compiler cannot list them.
    """
    from .header_excerpts import EXCERPTED_HEADERS

    done = _run_in(folder, [*_compile_command(compiler, library, sources, folder), "-M"])
    if done.returncode != 0:
        raise BuildError(f"the compiler lists no headers: {done.stdout}")
    include = str(_TORCH / "include") + os.sep
    paths = {word.removeprefix(include) for word in done.stdout.split() if word.startswith(include)}
    return sorted(paths | (set(EXCERPTED_HEADERS) if library.uses_excerpts else set()))


def digest_of_headers(headers: Iterable[str]) -> str:
    """Return a digest of headers in the include folder of the installed torch; they may be missing."""
    digest = hashlib.sha256()
    for header in headers:
        path = _TORCH / "include" / header
        digest.update(f"{header}\0{checksum(path) if path.is_file() else ''}\0".encode())
    return digest.hexdigest()


def _compile_command(compiler: Compiler, library: CppLibrary, sources: Mapping[str, bytes], folder: Path) -> list[str]:
    """Write the sources to a folder, and return the command that compiles them there."""
    import shlex
    import sysconfig

    for name, text in sources.items():  # the package may be inside an archive
        (folder / name).write_bytes(text)
    if library.uses_excerpts:
        from .header_excerpts import write_excerpts

        write_excerpts(_TORCH / "include", folder / "excerpts")
    excerpts = ("excerpts",) if library.uses_excerpts else ()
    includes = (*excerpts, str(_TORCH / "include"), sysconfig.get_path("include"))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    units = sorted(name for name in sources if name.endswith(".cpp"))
    return [*shlex.split(compiler.command), *FLAGS, abi, *(f"-isystem{include}" for include in includes), *units]


def _run_in(folder: Path, command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a compiler in a folder, which has its temporary files too. Names are relative: ccache compares them."""
    return _run(command, stderr=subprocess.STDOUT, cwd=folder, env={**os.environ, "TMPDIR": str(folder)})


def first_error(output: str) -> str:
    """Return the first error in a compiler's output, to continue a sentence; empty if none is found."""
    found = _ERROR.search(output)
    if found is None:
        return ""
    remedy = " (install Python's headers; on Debian: apt install python3-dev)" if "Python.h" in found[0] else ""
    return f": {found[0].strip()}{remedy}"


def checksum(library: Path) -> str:
    """Return the checksum of a library."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a compiler, whose output may have any encoding."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="backslashreplace",
        check=False,
        **options,
    )
