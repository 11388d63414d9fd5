"""Build the C++ once for each torch and compiler, keep what was built, and load it.

A build takes a while, many processes may want it at once, and any of them may be killed in the middle. So a build is
made in a folder of its own under a lock, is put in place by a rename, and comes with its checksum: what does not agree
with it is built again and never loaded.
"""

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.resources
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock

from ...errors import warn_user
from ...plugins.signals import raised_by_signal_handler
from .cache import BuildError, UntrustedCacheError, cache_directory, check_folders, is_trusted, make_folders
from .engine import NativeEngine
from .excerpts import write_excerpts


@dataclass(frozen=True)
class Library:
    """What is built: the C++ that lies in a package."""

    package: str
    name: str
    what: str
    """How a sentence calls it."""
    again: str
    """How a build that failed is tried again, for the end of a sentence."""


ENGINE = Library(str(__package__), "polycast_native", "the native engine", "`polycast build` tries again")
# NDEBUG as in torch's own libraries: without it at::RecordFunction has another layout than theirs.
_FLAGS = (
    "-O2",
    "-g0",
    "-DNDEBUG",
    "-fPIC",
    "-shared",
    "-std=c++20",
    "-fvisibility=hidden",
    "-DAT_PER_OPERATOR_HEADERS",
)
# One build is for every Python from 3.10 on, but those without a GIL, which have no limited API.
_PYTHON_FLAGS = () if sysconfig.get_config_var("Py_GIL_DISABLED") else ("-DPy_LIMITED_API=0x030A0000",)


def load() -> NativeEngine:
    """Return the native engine, building it if no build is there for this torch.

    Raises:
        BuildError: it cannot be built, or does not load.

    Warns:
        UserWarning: the cache cannot be trusted, so that it was built for this process alone.
    """
    return _load(cache_directory())


@functools.cache
def _load(directory: Path) -> NativeEngine:
    try:
        return _engine(find_or_build(directory))
    except UntrustedCacheError as error:
        refusal = error
    try:
        with tempfile.TemporaryDirectory(prefix="polycast-") as private:
            engine = _engine(find_or_build(Path(private)))
    except (BuildError, OSError) as error:
        if raised_by_signal_handler(error):
            raise
        raise BuildError(f"{refusal} It cannot be built elsewhere either: {error}") from error
    warn_user(f"polycast built its native engine for this process alone, as each process will: {refusal}")
    return engine


def _engine(library: Path) -> NativeEngine:
    try:
        return NativeEngine(_import(library))
    except ImportError as error:
        raise BuildError(f"{library} does not load: {error}. Remove it to have it built again.") from error


def _import(library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(ENGINE.name, str(library))
    spec = importlib.util.spec_from_file_location(ENGINE.name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def find_or_build(directory: Path, again: bool = False, wanted: Library = ENGINE) -> Path:
    """Return a build that is whole, making one if there is none.

    A build that failed is remembered by its log, for each process would try it anew; `again` does.

    Raises:
        UntrustedCacheError: others can write where it would be.
        BuildError: there is none, and none can be made.
    """
    sources = read_sources(wanted)
    place = directory / _digest(*_for_which(), *(text.hex() for text in sources.values()))
    compiler = _compiler()
    folder = place / _digest(*compiler, *_FLAGS) if compiler is not None else place
    try:
        check_folders(directory, folder)
        if compiler is None:
            return _any_build(directory, place, wanted)
        library = folder / f"{wanted.name}.so"
        if not _is_whole(library):
            if _failure(library).exists() and not again:
                raise BuildError(f"it failed before; its output is in {_failure(library)}. {_sentence(wanted.again)}")
            make_folders(directory, folder)
            check_folders(directory, folder)
            with FileLock(folder / "lock"):
                if not _is_whole(library):  # another process may have built it meanwhile
                    _remove_leftovers(folder)
                    _build(compiler[0], sources, library, wanted)
        return library
    except (OSError, NotImplementedError) as error:  # the latter is filelock's, for a file system without locks
        if raised_by_signal_handler(error):  # a TimeoutError is an OSError
            raise
        raise BuildError(
            f"nothing can be written to {folder}: {error}. Set XDG_CACHE_HOME to a folder of yours that has room."
        ) from error


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def read_sources(wanted: Library = ENGINE) -> Mapping[str, bytes]:
    """Return the C++ by the names of its files; it may lie in an archive.

    Raises:
        BuildError: it was not installed.
    """
    folder = importlib.resources.files(wanted.package)
    try:
        found = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith((".cpp", ".h"))}
    except OSError:
        found = {}
    if not found:
        raise BuildError(f"its C++ sources are not in {folder}. Install polycast with all its files.")
    return dict(sorted(found.items()))


def _any_build(directory: Path, place: Path, wanted: Library) -> Path:
    """Return a build of whatever compiler: where there is none now, it does as well."""
    for library in sorted(place.glob(f"*/{wanted.name}.so")):
        check_folders(directory, library.parent)
        if _is_whole(library):
            return library
    raise BuildError("no C++ compiler is found. Install one (c++), or name it in the variable CXX.")


def _for_which() -> tuple[str, ...]:
    """Return what a build is for: torch, the Python and the platform."""
    abi = str(torch.compiled_with_cxx11_abi())
    return torch.__version__, sys.implementation.cache_tag or "", abi, sysconfig.get_platform()


def _compiler() -> tuple[str, str] | None:
    """Return the command of the C++ compiler and its version, or None if there is no compiler."""
    command = os.environ.get("CXX", "c++")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BuildError(f"CXX={command!r} is not a command: {error}. Correct or unset the variable.") from error
    if not words or shutil.which(words[0]) is None:
        return None
    try:
        return command, _run([*words, "--version"], stderr=subprocess.DEVNULL).stdout
    except OSError as error:
        if raised_by_signal_handler(error):
            raise
        raise BuildError(f"the C++ compiler {command!r} does not run: {error}. Name another in CXX.") from error


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


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _is_whole(library: Path) -> bool:
    checksum = library.with_suffix(".sha256")
    try:
        return is_trusted(library) and is_trusted(checksum) and checksum.read_text() == _checksum(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _failure(library: Path) -> Path:
    return library.with_suffix(".log")


def _remove_leftovers(folder: Path) -> None:
    """Remove what a build left that was killed; called with the lock held, so that none is under way."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _build(compiler: str, sources: Mapping[str, bytes], library: Path, wanted: Library) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a daemon's stderr may be closed, or None
        sys.stderr.write(f"polycast: building {wanted.what}, once for this torch ...\n")
        sys.stderr.flush()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        scratch = Path(folder)
        built = scratch / library.name
        for name, text in sources.items():  # what is compiled is what the build is keyed by, and may be in an archive
            (scratch / name).write_bytes(text)
        command = _command(compiler, scratch, built)
        # What the compiler puts aside lies there too, and goes with the rest if it is killed.
        outcome = _run(command, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": folder})
        if outcome.returncode != 0 or not built.is_file():
            log = _failure(library)
            _write_log(log, f"{shlex.join(command)}\n{outcome.stdout}")
            raise BuildError(
                f"the compiler failed with status {outcome.returncode}; its output is in {log}. Once it can do better, "
                f"{wanted.again}."
            )
        _failure(library).unlink(missing_ok=True)
        checksum = built.with_suffix(".sha256")
        checksum.write_text(_checksum(built))
        # The checksum goes first: a library without its own, or with a former one, is not whole.
        for file in (checksum, built):
            file.chmod(0o600)
            os.replace(file, library.parent / file.name)


def _command(compiler: str, scratch: Path, built: Path) -> list[str]:
    # torch.utils.cpp_extension would tell the paths, but looks for CUDA at its import, and tells the user about it.
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    write_excerpts(include, scratch / "excerpts")
    headers = (str(scratch / "excerpts"), str(include), sysconfig.get_path("include"))
    return [
        *shlex.split(compiler),
        *_FLAGS,
        *_PYTHON_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in headers),
        *(str(path) for path in sorted(scratch.glob("*.cpp"))),
        f"-L{torch_folder / 'lib'}",
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        "-o",
        str(built),
    ]


def _write_log(log: Path, text: str) -> None:
    try:
        log.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:  # a full disk is no failure of the compiler, to be remembered as one
        log.unlink(missing_ok=True)
        raise
