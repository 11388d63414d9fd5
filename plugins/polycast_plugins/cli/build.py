"""``polycast build``: compile the C++ ahead of its first use, for instance in a container image.

The libraries of this machine are the native engine, those of plugins, and the ops of backends. Regions, observers and
recipes compile theirs when they are first used.
"""

import os
import re
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from polycast import backends
from polycast.plugin import NativeLibrary, manifests

from .terminal import library_errors

Library: TypeAlias = Any
"""A :class:`polycast.plugin.NativeLibrary`, or what its `of_engine` and `of_ops` return."""
_MEMORY = (("/proc/meminfo", r"MemAvailable: +(\d+) kB", 1024), ("/sys/fs/cgroup/memory.max", r"(\d+)", 1))
"""The files that say how much memory there is, and how much for this container: where it stands, and its unit."""
_COMPILER_MEMORY = 2**31
"""Bytes that a compiler may take."""


def run() -> None:
    """Compile the native engine, its observer and the C++ ops of available devices; print where each is.

    Libraries that came with polycast or were compiled before are not compiled again. If one cannot be imported or
    compiled, the others still are, and the exit status is 1.
    """
    problems: list[str] = []
    with library_errors():
        wanted = libraries(problems)
        unavailable = packages_of_ops(usable=False)
    for problem in problems:
        typer.echo(f"polycast: {problem}", err=True)
    reasons: list[str] = []
    with _progress() as shown, ThreadPoolExecutor(_compilers()) as pool:
        answers = {pool.submit(_build, each, shown): each for each in sorted(wanted, key=_size, reverse=True)}
        try:
            for answer in as_completed(answers):
                library = answers[answer]
                try:
                    typer.echo(f"{library.description}: {answer.result()}")
                except RuntimeError as error:
                    why = ", for the same reason" if [str(error)] == reasons[-1:] else f": {error}"
                    typer.echo(f"polycast: {library.description} cannot be built{why}", err=True)
                    reasons.append(str(error))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # otherwise the queued ones would still be compiled
            raise
    for package, device_type in unavailable.items():
        typer.echo(f"{NativeLibrary.of_ops(package).description}: not compiled: {device_type} cannot be used now")
    if problems or reasons:
        raise typer.Exit(1)


def _compilers() -> int:
    """Return how many compilers to run at once: as many as there are cores, and memory for them."""
    numbers = [os.cpu_count() or 1]
    for path, pattern, unit in _MEMORY:
        with suppress(OSError):
            if found := re.search(pattern, Path(path).read_text(encoding="ascii")):
                numbers.append(int(found[1]) * unit // _COMPILER_MEMORY)
    return max(1, min(numbers))


def _progress() -> Progress:
    """Return a display of what is being compiled, and for how long, on a terminal."""
    screen, columns = Console(stderr=True), ("[progress.description]{task.description}", TimeElapsedColumn())
    return Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal, redirect_stdout=sys.stdout.isatty()
    )


def _size(library: Library) -> int:
    """Return the size of the sources: what takes longest is compiled first."""
    try:
        return sum(map(len, library.read_sources().values()))
    except RuntimeError:  # they are missing, as building says
        return 0


def _build(library: Library, shown: Progress) -> str:
    """Compile a library if needed, and return where it is, and how long it took."""
    started = time.perf_counter()
    task = shown.add_task(f"compiling {library.description}", total=None)
    try:
        if shown.disable and not library.is_built():
            typer.echo(f"polycast: compiling {library.description} ...", err=True)
        return f"{library.build()} ({time.perf_counter() - started:.1f} s)"
    finally:
        shown.remove_task(task)


def common_libraries(problems: list[str] | None = None) -> list[Library]:
    """Return the libraries that are the same for all devices: the native engine and those of plugins.

    Args:
        problems: gets a sentence for each library that cannot be imported, which is left out.

    Raises:
        RuntimeError: one cannot be imported, and `problems` is None.
    """
    found: list[Library] = [NativeLibrary.of_engine()]
    for each in manifests():
        for path in each.plugin.libraries:
            try:
                found.append(each.resolve(path))
            except RuntimeError as error:
                if problems is None:
                    raise
                problems.append(str(error))
    return found


def libraries(problems: list[str] | None = None) -> list[Library]:
    """Return all libraries for this machine; see :func:`packages_of_ops` and :func:`common_libraries`."""
    return [*common_libraries(problems), *map(NativeLibrary.of_ops, packages_of_ops())]


def packages_of_ops(usable: bool = True) -> Mapping[str, str]:
    """Return the packages with C++ ops of the devices that can be used, or of the others; and the device type of each.

    Raises:
        ValueError: a ``POLYCAST_`` variable has an invalid value.
    """
    statuses = [each for each in backends().values() if each.is_usable == usable]
    return {package: each.device_type for each in statuses for package in each.ops_in_cpp}


def origins() -> Mapping[str, str]:
    """Return where the ops of each package, of devices and of plugins, come from; raises as `packages_of_ops` does."""
    ops = {package: NativeLibrary.of_ops(package) for package in packages_of_ops()}
    of_plugins = {each.package: each for each in common_libraries(problems=[])}
    for package, library in of_plugins.items():
        if library.description == NativeLibrary.of_ops(package).description:  # neither the engine nor an observer
            ops[package] = library
    return {package: _origin(library) for package, library in ops.items()}


def _origin(library: Library) -> str:
    try:
        return library.find() or "not compiled yet; `polycast build` does it"
    except (RuntimeError, OSError) as error:
        return f"none: {error}"
