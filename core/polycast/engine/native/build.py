"""Build the C++ once for each torch and compiler, keep what was built, and load it.

A build takes a while, many processes may want it at once, and any of them may be killed in the middle. So a build is
made in a folder of its own under a lock, is put in place by a rename, and comes with its checksum: what does not agree
with it is built again and never loaded.
"""

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

from .engine import NativeEngine

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
_MODULE = "polycast_native"
_FLAGS = ("-O2", "-g0", "-fPIC", "-shared", "-std=c++20", "-fvisibility=hidden")


class BuildError(Exception):
    """The native engine cannot be built or loaded; the text says why, and names the log where there is one."""


def cache_directory() -> Path:
    """Return where builds are kept: ``$XDG_CACHE_HOME/polycast``, or ``~/.cache/polycast``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "polycast"


def load() -> NativeEngine:
    """Return the native engine, building it if no build is there for this torch.

    Raises:
        BuildError: it cannot be built, or does not load.
    """
    return _load(cache_directory())


@functools.cache
def _load(directory: Path) -> NativeEngine:
    library = find_or_build(directory)
    try:
        return NativeEngine(_import(library))
    except ImportError as error:
        raise BuildError(f"{library} does not load: {error}.") from error


def _import(library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(library))
    spec = importlib.util.spec_from_file_location(_MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def find_or_build(directory: Path, again: bool = False) -> Path:
    """Return a build that is whole, making one if there is none.

    A build that failed is remembered by its log, for each process would try it anew; `again` does.

    Raises:
        BuildError: there is none, and none can be made.
    """
    place = directory / _digest(*_for_which(), *(source.read_bytes().hex() for source in SOURCES))
    compiler = _compiler()
    if compiler is None:
        # A build of another compiler does as well as one of none.
        for library in sorted(place.glob(f"*/{_MODULE}.so")):
            if _is_whole(library):
                return library
        raise BuildError("no C++ compiler is found. Install one (c++), or name it in the variable CXX.")
    library = place / _digest(*compiler, *_FLAGS) / f"{_MODULE}.so"
    if not _is_whole(library):
        if _failure(library).exists() and not again:
            raise BuildError(f"it failed before; its output is in {_failure(library)}. `polycast build` tries again.")
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(library.parent / "lock"):
                if not _is_whole(library):  # another process may have built it meanwhile
                    _build(compiler[0], library)
        except OSError as error:
            raise BuildError(f"nothing can be written to {library.parent}: {error}.") from error
    return library


def _for_which() -> tuple[str, ...]:
    """Return what a build is for: torch, the Python and the platform."""
    abi = str(torch.compiled_with_cxx11_abi())
    return torch.__version__, sys.implementation.cache_tag or "", abi, sysconfig.get_platform()


def _compiler() -> tuple[str, str] | None:
    """Return the command of the C++ compiler and its version, or None if there is no compiler."""
    command = os.environ.get("CXX", "c++")
    if not shlex.split(command) or shutil.which(shlex.split(command)[0]) is None:
        return None
    answer = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=False)
    return command, answer.stdout


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _is_whole(library: Path) -> bool:
    try:
        return library.with_suffix(".sha256").read_text() == _checksum(library)
    except OSError:
        return False


def _failure(library: Path) -> Path:
    return library.with_suffix(".log")


def _build(compiler: str, library: Path) -> None:
    print("polycast: building the native engine, once for this torch ...", file=sys.stderr, flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # those of what it imports are not the user's to mend
        from torch.utils import cpp_extension  # its import takes a while, and is needed here only

    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        command = [
            *shlex.split(compiler),
            *_FLAGS,
            f"-DTORCH_EXTENSION_NAME={_MODULE}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-isystem{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]),
            *(str(path) for path in SOURCES if path.suffix == ".cpp"),
            *(f"-L{path}" for path in cpp_extension.library_paths()),
            *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
            "-o",
            str(built),
        ]
        outcome = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if outcome.returncode != 0 or not built.is_file():
            log = _failure(library)
            log.write_text(f"{shlex.join(command)}\n{outcome.stdout}")
            raise BuildError(f"the compiler failed with status {outcome.returncode}; its output is in {log}.")
        _failure(library).unlink(missing_ok=True)
        built.with_suffix(".sha256").write_text(_checksum(built))
        # The checksum goes first: a library without its own, or with a former one, is not whole.
        os.replace(built.with_suffix(".sha256"), library.with_suffix(".sha256"))
        os.replace(built, library)
