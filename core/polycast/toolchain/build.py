"""Build a C++ library once for each torch, and cache it.

A build takes a while, several processes may start it at once, and each may be killed halfway. So a library is compiled
in a temporary folder under a lock, moved into the cache by a rename, and stored with its checksum. A library that does
not match its checksum is never loaded: it is built again.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from typing_extensions import Self

from ..common.announce import announce, log
from ..errors import raise_if_callers
from .cache_folder import check_folders, make_folders, others_can_write
from .compiler import FLAGS, PLATFORM, PYTHON_ABI, Compiler, checksum, compile_library, first_error
from .cpp_library import BuildError, CppLibrary
from .prebuilt import require_compiler

_SILENT_WAIT = 5.0
"""Seconds to wait for another process's build before printing a message."""
_FIRST = "building {}, once for this torch, in about half a minute (`polycast build`: all, some 40 s on two cores) ..."
_OUT_OF_RESOURCES = re.compile(
    r"^.*(?:killed signal|no space left|cannot allocate memory|out of memory|memory exhausted|bad_alloc).*$",
    re.IGNORECASE | re.MULTILINE,
)
"""Output of compilers that failed because of the machine, not the source. The next process tries again."""


@dataclass(frozen=True)
class _CachedBuild:
    """A library's entry in the cache, for the running torch; it may not be built yet."""

    library: CppLibrary
    sources: Mapping[str, bytes]
    cache: Path
    folder: Path
    """The folder of one compiler's build, or the folder above those of all compilers."""
    compiler: Compiler | None = None

    @classmethod
    def locate(cls, cache: Path, library: CppLibrary) -> Self:
        """Return the entry of a library, of its builds by all compilers."""
        sources = library.read_sources()
        torch_abi = str(torch.compiled_with_cxx11_abi())
        target = (torch.__version__, PYTHON_ABI, torch_abi, PLATFORM)
        folder = cache / _digest(*target, *FLAGS, *(text.hex() for text in sources.values()))
        return cls(library, sources, cache, folder)

    def by(self, compiler: Compiler) -> Self:
        """Return the entry of the build by one compiler."""
        return replace(self, folder=self.folder / _digest(*compiler), compiler=compiler)

    @property
    def path(self) -> Path:
        """The path of the library."""
        return self.folder / f"{self.library.name}.so"

    @property
    def log(self) -> Path:
        """The path of the compiler's output, which exists if the build failed."""
        return self.path.with_suffix(".log")

    def find(self) -> Path | None:
        """Return the path of a complete build, or None; raise UntrustedCacheError if others can write to the cache."""
        check_folders(self.cache, self.folder)
        for path in [self.path] if self.compiler else sorted(self.folder.glob(f"*/{self.path.name}")):
            check_folders(self.cache, path.parent)
            if _is_complete(path):
                return path
        return None

    def check_not_failed(self, retry: bool = False) -> None:
        """Raise BuildError if the compiler has failed before, unless `retry`."""
        if self.log.exists() and not retry:
            hint = self.library.retry_hint
            error = first_error(self._logged())
            raise BuildError(f"it failed before{error}; its output is in {self.log}. {hint[:1].upper()}{hint[1:]}.")

    def _logged(self) -> str:
        try:
            return self.log.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # another process may have removed it
            return ""


def _is_complete(library: Path) -> bool:
    expected = library.with_suffix(".sha256")
    try:
        return _is_trusted(library) and _is_trusted(expected) and expected.read_text() == checksum(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _is_trusted(file: Path) -> bool:
    return file.is_file() and others_can_write(file) is None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def find_build(cache: Path, library: CppLibrary) -> Path | None:
    """Return the path of a cached build, or None if it is yet to be built.

    Raises:
        UntrustedCacheError: other users can write to the cache.
        BuildError: there is no build, and none would be tried.
    """
    build = _CachedBuild.locate(cache, library)
    path = build.find()
    if path is None:
        build.by(require_compiler()).check_not_failed()
    return path


def get_or_build(cache: Path, library: CppLibrary, *, retry: bool = False, own: bool = False) -> Path:
    """Return the path of a cached build, by whichever compiler, building it if there is none.

    Args:
        cache: the cache's directory.
        library: the library.
        retry: whether to try a build again that failed. Otherwise each process would.
        own: whether to take only a build by the compiler that is found now.

    Raises:
        UntrustedCacheError: other users can write to the cache.
        BuildError: there is no build, and none can be made.
    """
    try:
        build = _CachedBuild.locate(cache, library)
        path = None if own else build.find()
        if path is None:
            build = build.by(require_compiler())
            path = build.find()
        if path is None:
            build.check_not_failed(retry)
            make_folders(cache, build.folder)
            with _lock(build):
                # Another thread or process may have built it since, or failed to.
                path = build.find()
                if path is None:
                    build.check_not_failed(retry)
                    _remove_leftovers(build.folder)
                    if not retry:  # else the caller says so
                        announce(_FIRST.format(library.description))
                    path = _build(build)
        return path
    except (OSError, NotImplementedError) as error:  # filelock raises the latter on a file system without locks
        raise_if_callers(error)
        raise BuildError(
            f"nothing can be written to {build.folder}: {error}. Set XDG_CACHE_HOME to a folder of yours that has room."
        ) from error


@contextlib.contextmanager
def _lock(build: _CachedBuild) -> Iterator[None]:
    """Hold the lock of a build. Print a message while waiting for long: the other build may hang."""
    from filelock import FileLock, Timeout

    lock = FileLock(build.folder / "lock")
    try:
        lock.acquire(timeout=_SILENT_WAIT)
    except Timeout:
        announce(f"waiting for another process that builds {build.library.description}; its lock is {lock.lock_file}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of builds that were killed. The caller holds the lock, so no build is running."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _build(build: _CachedBuild) -> Path:
    assert build.compiler is not None
    log.info("the build of %s begins: %s", build.library.description, build.path)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=build.folder) as folder:
        compiled = Path(folder) / build.path.name
        status, output = compile_library(build.compiler, build.library, build.sources, compiled)
        log.info("the build ended with status %d after %.1f s: %s", status, time.perf_counter() - began, build.path)
        _check_not_stopped(status, output)
        if status != 0 or not compiled.is_file():
            _write_log(build.log, output)
            raise BuildError(
                f"the compiler failed with status {status}{first_error(output)}; its output is in {build.log}. When "
                f"the cause is fixed, {build.library.retry_hint}."
            )
        build.log.unlink(missing_ok=True)
        expected = compiled.with_suffix(".sha256")
        expected.write_text(checksum(compiled))
        # The checksum is moved first: a library without its own checksum is incomplete.
        for file in (expected, compiled):
            file.chmod(0o600)
            os.replace(file, build.folder / file.name)
    return build.path


def _check_not_stopped(status: int, output: str) -> None:
    """Raise BuildError if the compiler was interrupted, killed or ran out of memory or space; this is not logged."""
    if status == -signal.SIGINT:
        raise BuildError("the compiler was interrupted.")
    reason = _OUT_OF_RESOURCES.search(output) if status != 0 else None
    if status < 0 or status > 128 or reason is not None:
        detail = f", {reason[0].strip()!r}" if reason is not None else ""
        raise BuildError(
            f"the compiler was killed, or had no memory or space: status {status}{detail}. "
            "The next process tries again."
        )


def _write_log(log: Path, text: str) -> None:
    try:
        log.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:  # a full disk must not be recorded as a failure of the compiler
        log.unlink(missing_ok=True)
        raise
