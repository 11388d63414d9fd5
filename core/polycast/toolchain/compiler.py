"""Compiling the C++: the compiler, its flags, and what it is given.

It compiles for Python's limited API, so that what it makes serves every Python from 3.10 on. A build of Python without
a GIL has no such API, and an engine of its own.
"""

import hashlib
import importlib.resources
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .build_cache import BuildError
from .header_excerpts import write_excerpts
from .library import Library


class Compiler(NamedTuple):
    """A C++ compiler: its command, and what it says of its version."""

    command: str
    version: str


_INCLUDE = "include"
"""The folder of headers that every library may include. A header of the same name in the library's package wins."""

PYTHON = str(sysconfig.get_config_var("SOABI")) if sysconfig.get_config_var("Py_GIL_DISABLED") else "abi3"
"""The Pythons that what is compiled here is for."""

# NDEBUG as in torch's own libraries: without it at::RecordFunction has another layout than theirs.
FLAGS = (
    "-O2",
    "-g0",
    "-DNDEBUG",
    "-fPIC",
    "-std=c++20",
    "-fvisibility=hidden",
    "-ffunction-sections",
    "-DAT_PER_OPERATOR_HEADERS",
    *(("-DPy_LIMITED_API=0x030A0000",) if PYTHON == "abi3" else ()),
)
"""The compiler's flags, for every library."""


def read_sources(library: Library) -> Mapping[str, bytes]:
    """Return the C++ by the names of its files; it may lie in an archive.

    Raises:
        BuildError: it was not installed.
    """
    try:
        package = importlib.resources.files(library.package)
    except ModuleNotFoundError as error:
        raise BuildError(f"there is no package {library.package} with its C++ sources: {error}.") from error
    folders = [package if name == "." else package / name for name in library.folders]
    found: dict[str, bytes] = {}
    for folder in (*folders, importlib.resources.files(__package__) / _INCLUDE):
        try:
            of_folder = {
                file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith((".cpp", ".h"))
            }
        except OSError:
            of_folder = {}
        if not of_folder:
            raise BuildError(f"its C++ sources are not in {folder}. Install polycast with all its files.")
        found = of_folder | found
    return dict(sorted(found.items()))


def find_compiler() -> Compiler | None:
    """Return the C++ compiler, or None if there is none.

    Raises:
        BuildError: the one that CXX names cannot be run.
    """
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
    compiler: Compiler, wanted: Library, sources: Mapping[str, bytes], library: Path, linking: Sequence[str] = ()
) -> tuple[int, str]:
    """Compile into a library, in a folder that is for this alone; return the compiler's status and output.

    Raises:
        BuildError: torch's headers are not what they were.
    """
    folder = library.parent
    for name, text in sources.items():  # what is compiled is what the build is keyed by, and may be in an archive
        (folder / name).write_bytes(text)
    # torch.utils.cpp_extension would tell the paths, but looks for CUDA at its import, and tells the user about it.
    torch_folder = Path(torch.__file__).parent
    write_excerpts(torch_folder / "include", folder / "excerpts")
    headers = ("excerpts", str(torch_folder / "include"), sysconfig.get_path("include"))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    units = sorted(name for name in sources if name.endswith(".cpp"))
    command = shlex.split(compiler.command)
    compiling = [*command, *FLAGS, abi, *(f"-isystem{path}" for path in headers), *units]
    libraries = (f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
    # Python's functions are in whoever loads it, which macOS's linker wants to be told.
    elsewhere = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    ends = ["-shared", *elsewhere, *linking, *libraries, "-o", str(library)]
    steps = [[*compiling, *ends]]
    if shutil.which("ccache") is not None and "ccache" not in compiler.command:  # which knows objects, not libraries
        steps = [["ccache", *compiling, "-c", "-o", "unit.o"], [*command, "unit.o", *ends]]
    output = ""
    for step in steps:
        # What the compiler puts aside lies there too, and goes with the rest if it is killed. Names are relative, for
        # ccache compares them.
        done = _run(step, stderr=subprocess.STDOUT, cwd=folder, env={**os.environ, "TMPDIR": str(folder)})
        output += f"{shlex.join(step)}\n{done.stdout}"
        if done.returncode != 0:
            break
    return done.returncode, output


def checksum(library: Path) -> str:
    """Return what tells a library that was cut short, or changed."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _run(command: list[str], **settings: Any) -> "subprocess.CompletedProcess[str]":
    """Run a compiler, which may write in any encoding."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="backslashreplace",
        check=False,
        **settings,
    )
