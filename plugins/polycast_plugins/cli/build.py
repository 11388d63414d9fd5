"""``polycast build``: compile the C++ ahead of its first use, for instance in a container image."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import typer

from polycast.plugin import NativeLibrary

from .compiled import Library, libraries, packages_of_ops
from .terminal import library_errors


def run() -> None:
    """Compile the native engine, its observer and the C++ ops of available devices; print where each is.

    Libraries that came with polycast or were compiled before are not compiled again. If one cannot be imported or
    compiled, the others still are, and the exit status is 1.
    """
    problems: list[str] = []
    with library_errors():
        wanted = libraries(problems)
        unavailable = packages_of_ops("unavailable")
    for problem in problems:
        typer.echo(f"polycast: {problem}", err=True)
    failed = bool(problems)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a compiler for each
        answers = [pool.submit(_build, each) for each in wanted]
        try:
            for library, answer in zip(wanted, answers, strict=True):
                try:
                    typer.echo(f"{library.description}: {answer.result()}")
                except RuntimeError as error:
                    typer.echo(f"polycast: {library.description} cannot be built: {error}", err=True)
                    failed = True
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # otherwise the queued ones would still be compiled
            raise
    for package, device_type in unavailable.items():
        typer.echo(f"{NativeLibrary.of_ops(package).description}: not compiled: {device_type} cannot be used now")
    if failed:
        raise typer.Exit(1)


def _build(library: Library) -> str:
    """Compile a library if needed, and return where it is, and how long it took."""
    started = time.perf_counter()
    return f"{library.build()} ({time.perf_counter() - started:.1f} s)"
