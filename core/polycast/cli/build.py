"""``polycast build``: have what is compiled ahead of its first use, for instance in a container image."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import typer

from ..toolchain.build import get_or_build
from ..toolchain.build_cache import cache_directory
from ..toolchain.cpp_library import BuildError, CppLibrary
from ..toolchain.load import describe_built, describe_prebuilt
from ..toolchain.prebuilt import find_prebuilt
from .compiled import libraries, packages_of_ops
from .terminal import library_errors


def run() -> None:
    """Compile the native engine, its observer and backends' ops in C++; print where each is and how long that took.

    What came with polycast, or was compiled before, is not compiled again. Ops are those of devices that can be used.

    Exits with status 1 where something cannot be compiled; the rest is compiled all the same.
    """
    with library_errors():
        wanted = libraries()
        absent = packages_of_ops("unavailable")
    failed = False
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a compiler for each
        answers = [pool.submit(_have, each) for each in wanted]
        try:
            for library, answer in zip(wanted, answers, strict=True):
                try:
                    typer.echo(f"{library.description}: {answer.result()}")
                except BuildError as error:
                    typer.echo(f"polycast: {library.description} cannot be built: {error}", err=True)
                    failed = True
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # or what waits for a core would be compiled yet
            raise
    for package, device_type in absent.items():
        typer.echo(f"{CppLibrary.of_ops(package).description}: not compiled, for {device_type} cannot be used now")
    if failed:
        raise typer.Exit(1)


def _have(library: CppLibrary) -> str:
    """Have a library, compiling it where that is to be done, and say where it is."""
    prebuilt = find_prebuilt(library)
    if prebuilt is not None:
        return describe_prebuilt(prebuilt)
    started = time.perf_counter()
    built = get_or_build(cache_directory(), library, retry=True)
    return f"{describe_built(built)} ({time.perf_counter() - started:.1f} s)"
