"""Build the C++ once for each torch and compiler, keep what was built, and load it.

A build takes a while, many processes may want it at once, and any of them may be killed in the middle. So a build is
made in a folder of its own under a lock, is put in place by a rename, and comes with its checksum: what does not agree
with it is built again and never loaded.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock, Timeout

from ..errors import warn_user
from . import prebuilt
from .build_cache import BuildError, UntrustedCacheError, cache_directory, check_folders, is_trusted, make_folders
from .compiler import (
    FLAGS,
    PYTHON,
    Compiler,
    checksum,
    compile_library,
    find_compiler,
    read_sources,
)
from .library import Library

_PATIENCE = 5.0
"""After how many seconds of waiting for another build that is said."""
_CUT_SHORT = re.compile(
    r"^.*(?:killed signal|no space left|cannot allocate memory|out of memory|memory exhausted|bad_alloc).*$",
    re.IGNORECASE | re.MULTILINE,
)
"""What compilers say where the machine failed them and not the source: such a failure is not remembered."""


def compile_ahead(wanted: Library) -> Exception | None:
    """Compile what is to be loaded next, if that is still to be done; return why that failed, for who loads it to say.

    Whoever loads it holds a lock over forks. Compiling takes long, and a fork would wait for it: so this goes before,
    without the lock.
    """
    try:
        if prebuilt.find(wanted) is None:
            with contextlib.suppress(UntrustedCacheError):  # then it is built as it is loaded, for the process alone
                find_or_build(cache_directory(), wanted)
    except TimeoutError:  # from the user's signal handler
        raise
    except Exception as error:
        return error
    return None


def import_prebuilt(wanted: Library) -> tuple[ModuleType, str] | None:
    """Return a library that came with polycast, as a module, and its origin."""
    library = prebuilt.find(wanted)
    try:
        return None if library is None else (_import(library), prebuilt.origin(library))
    except ImportError:  # it asks for a newer libc than there is here, say
        return None


def import_built(directory: Path, wanted: Library) -> tuple[ModuleType, str]:
    """Return a library that is built here, as a module, and its origin."""
    try:
        return _import_compiled(find_or_build(directory, wanted))
    except UntrustedCacheError as error:
        refusal = error
    try:
        with tempfile.TemporaryDirectory(prefix="polycast-") as private:
            imported = _import_compiled(find_or_build(Path(private), wanted))
    except TimeoutError:
        raise
    except (BuildError, OSError) as error:
        raise BuildError(f"{refusal} It cannot be built elsewhere either: {error}") from error
    warn_user(f"polycast built {wanted.description} for this process alone, as each process will: {refusal}")
    return imported


def _import_compiled(library: Path) -> tuple[ModuleType, str]:
    try:
        return _import(library), origin(library)
    except ImportError as error:
        raise BuildError(f"{library} does not load: {error}. Remove it to have it built again.") from error


def _import(library: Path) -> ModuleType:
    name = library.stem
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@dataclass(frozen=True)
class _Place:
    """Where the builds of a source for this torch lie, and in which folder those of the compiler that is there now."""

    cache: Path
    sources: Mapping[str, bytes]
    folder: Path
    compiler: Compiler | None
    wanted: Library

    @classmethod
    def of(cls, cache: Path, wanted: Library) -> "_Place":
        sources = read_sources(wanted)
        folder = cache / _digest(*_for_which(), *(text.hex() for text in sources.values()))
        compiler = find_compiler()
        if compiler is None:
            return cls(cache, sources, folder, None, wanted)
        return cls(cache, sources, folder / _digest(*compiler, *FLAGS), compiler, wanted)

    @property
    def library(self) -> Path:
        return self.folder / f"{self.wanted.name}.so"

    def find(self) -> Path | None:
        """Return a build that is whole: of this compiler or, where there is none now, of any: it does as well."""
        check_folders(self.cache, self.folder)
        for library in [self.library] if self.compiler else sorted(self.folder.glob(f"*/{self.library.name}")):
            check_folders(self.cache, library.parent)
            if _is_whole(library):
                return library
        return None

    def refusal(self, again: bool = False) -> str | None:
        """Say why no build is to be tried, unless `again` has it tried where it failed."""
        if self.compiler is None:
            return "no C++ compiler is found. Install one (c++), or name it in the variable CXX."
        if _failure(self.library).exists() and not again:
            return f"it failed before; its output is in {_failure(self.library)}. {_sentence(self.wanted.retry_hint)}"
        return None


def find_build(directory: Path, wanted: Library) -> Path | None:
    """Return a build that is whole, or None: it is yet to be made.

    Raises:
        UntrustedCacheError: others can write where it would be.
        BuildError: there is none, and none would be made.
    """
    place = _Place.of(directory, wanted)
    library = place.find()
    refusal = place.refusal() if library is None else None
    if refusal is not None:
        raise BuildError(refusal)
    return library


def find_or_build(directory: Path, wanted: Library, again: bool = False) -> Path:
    """Return a build that is whole, making one if there is none.

    A build that failed is remembered by its log, for each process would try it anew; `again` does.

    Raises:
        UntrustedCacheError: others can write where it would be.
        BuildError: there is none, and none can be made.
    """
    place = _Place.of(directory, wanted)
    try:
        library = place.find()
        if library is not None:
            return library
        refusal = place.refusal(again)
        if refusal is not None:
            raise BuildError(refusal)
        make_folders(directory, place.folder)
        check_folders(directory, place.folder)
        with _locked(place):
            if not _is_whole(place.library):  # another thread or process may have built it meanwhile,
                refusal = place.refusal(again)  # or failed to
                if refusal is not None:
                    raise BuildError(refusal)
                _remove_leftovers(place.folder)
                _build(place)
        return place.library
    except TimeoutError:  # from the user's signal handler
        raise
    except (OSError, NotImplementedError) as error:  # the latter is filelock's, for a file system without locks
        raise BuildError(
            f"nothing can be written to {place.folder}: {error}. Set XDG_CACHE_HOME to a folder of yours that has room."
        ) from error


@contextlib.contextmanager
def _locked(place: _Place) -> Iterator[None]:
    """Hold the lock of a build; say so where it is waited for, since another build may hang."""
    lock = FileLock(place.folder / "lock")
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout:
        _say(f"waiting for another process that builds {place.wanted.description}; its lock is {lock.lock_file}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a daemon's stderr may be closed, or None
        sys.stderr.write(f"polycast: {text}\n")
        sys.stderr.flush()


def origin(library: Path) -> str:
    """Say where a build came from, in words."""
    return f"compiled here: {library}"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _for_which() -> tuple[str, ...]:
    """Return what a build is for: torch, the Pythons and the platform."""
    abi = str(torch.compiled_with_cxx11_abi())
    return torch.__version__, PYTHON, abi, sysconfig.get_platform()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _is_whole(library: Path) -> bool:
    told = library.with_suffix(".sha256")
    try:
        return is_trusted(library) and is_trusted(told) and told.read_text() == checksum(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _failure(library: Path) -> Path:
    return library.with_suffix(".log")


def _remove_leftovers(folder: Path) -> None:
    """Remove what a build left that was killed; called with the lock held, so that none is under way."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _build(place: _Place) -> None:
    assert place.compiler is not None
    _say(f"building {place.wanted.description}, once for this torch ...")
    with tempfile.TemporaryDirectory(dir=place.folder) as folder:
        built = Path(folder) / place.library.name
        status, output = compile_library(place.compiler, place.wanted, place.sources, built)
        if status == -signal.SIGINT:  # the user's, at a terminal, to this process too, of which another thread is told
            raise BuildError("the compiler was interrupted.")
        said = _CUT_SHORT.search(output) if status != 0 else None
        if status < 0 or status > 128 or said is not None:
            reason = f", {said[0].strip()!r}" if said is not None else ""
            raise BuildError(
                f"the compiler was killed, or had no memory or space: status {status}{reason}. The next process tries "
                "again."
            )
        log = _failure(place.library)
        if status != 0 or not built.is_file():
            _write_log(log, output)
            raise BuildError(
                f"the compiler failed with status {status}; its output is in {log}. Once it can do better, "
                f"{place.wanted.retry_hint}."
            )
        log.unlink(missing_ok=True)
        told = built.with_suffix(".sha256")
        told.write_text(checksum(built))
        # The checksum goes first: a library without its own, or with a former one, is not whole.
        for file in (told, built):
            file.chmod(0o600)
            os.replace(file, place.folder / file.name)


def _write_log(log: Path, text: str) -> None:
    try:
        log.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:  # a full disk is no failure of the compiler, to be remembered as one
        log.unlink(missing_ok=True)
        raise
