"""Run the C++ compiler.

It compiles for Python's limited API, so a library serves every Python from 3.10 on. A free-threaded Python has no
limited API, and needs libraries of its own.

Some of torch's headers take long to parse, or fit one Python only. Single structs are cut out of the installed ones, so
that their layout is that of the torch that is compiled for.

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
INCLUDE = _TORCH / "include"
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

# Collect garbage less often in the compiler: 9 to 18 % less time for 25 to 30 % more memory, and the same code.
_OF_GCC = ("--param", "ggc-min-expand=400", "--param", "ggc-min-heapsize=400000")

_EXCERPTS = {
    "THPVariable": "torch/csrc/autograd/python_variable.h",
    "python_error": "torch/csrc/Exceptions.h",
    "ToCopyBackward0": "torch/csrc/autograd/generated/Functions.h",
}
"""The structs that are cut out, and the header of each."""
EXCERPTED_HEADERS = tuple(_EXCERPTS.values())
# Some headers include all ops and need none of their functions.
_REPLACEMENTS = {"ATen/ATen.h": "#pragma once\n#include <ATen/core/Tensor.h>\n"}
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

    compile_ = compile_command(compiler, library, sources, path.parent)
    libraries = (f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
    # The process that loads the library provides Python's symbols; macOS's linker has to be told.
    undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    link = ["-shared", *undefined, *linker_flags, *libraries, "-o", str(path)]
    steps = [[*compile_, *link]]
    if shutil.which("ccache") is not None and "ccache" not in compiler.command:  # it caches objects, not libraries
        steps = [["ccache", *compile_, "-c", "-o", "unit.o"], [*shlex.split(compiler.command), "unit.o", *link]]
    output = ""
    for step in steps:
        done = run_in(path.parent, step)
        output += f"{shlex.join(step)}\n{done.stdout}"
        if done.returncode != 0:
            break
    return done.returncode, output


def compile_command(compiler: Compiler, library: CppLibrary, sources: Mapping[str, bytes], folder: Path) -> list[str]:
    """Write the sources to a folder, and return the command that compiles them there; raises as `compile_library`."""
    import shlex
    import sysconfig

    for name, text in sources.items():  # the package may be inside an archive
        (folder / name).write_bytes(text)
    if library.uses_excerpts:
        _write_excerpts(folder / "excerpts")
    excerpts = ("excerpts",) if library.uses_excerpts else ()
    includes = (*excerpts, str(INCLUDE), sysconfig.get_path("include"))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = (*FLAGS, *_OF_GCC) if "Free Software" in compiler.version else FLAGS
    units = sorted(name for name in sources if name.endswith(".cpp"))
    return [*shlex.split(compiler.command), *flags, abi, *(f"-isystem{include}" for include in includes), *units]


def _write_excerpts(folder: Path) -> None:
    """Write the excerpts to a folder, which the compiler has to search before torch's headers."""
    excerpts = {f"excerpt_{name}.h": _extract_struct(INCLUDE / header, name) for name, header in _EXCERPTS.items()}
    for path, text in {**excerpts, **_REPLACEMENTS}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _extract_struct(header: Path, name: str) -> str:
    try:
        text = header.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BuildError(f"the header {header} is missing. Install torch with its headers.") from None
    pattern = rf"^struct (?:TORCH_\w+ )?{name}\b[^;{{]*\{{\n(?:(?!struct |\}};).*\n)*\}};$"
    found = re.findall(pattern, text, re.MULTILINE)
    if not found:
        raise BuildError(f"no struct {name} is found in {header}: this torch is newer than this polycast.")
    # If the struct begins twice, under #if, the first beginning is for Windows.
    return re.sub(r"^#.*\n", "", found[-1], flags=re.MULTILINE) + "\n"


def digest_of_headers(headers: Iterable[str]) -> str:
    """Return a digest of headers in the include folder of the installed torch; they may be missing."""
    digest = hashlib.sha256()
    for header in headers:
        path = INCLUDE / header
        digest.update(f"{header}\0{checksum(path) if path.is_file() else ''}\0".encode())
    return digest.hexdigest()


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


def run_in(folder: Path, command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a compiler in a folder, which has its temporary files too. Names are relative: ccache compares them."""
    return _run(command, stderr=subprocess.STDOUT, cwd=folder, env={**os.environ, "TMPDIR": str(folder)})


def _run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a compiler, whose output may have any encoding."""
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
    return subprocess.run(command, encoding="utf-8", errors="backslashreplace", check=False, **streams)
