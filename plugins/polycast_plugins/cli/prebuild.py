"""``python -m polycast_plugins.cli.prebuild FOLDER [PACKAGE ...]``: build a wheel's libraries for the running torch.

They are the native engine, those of plugins, and the ops of the named backend packages. ``tools/platform_wheel.py``
adds them to a wheel. If one cannot be imported or built, the others still are, and the exit status is 1.
"""

import sys
from pathlib import Path

from polycast.plugin import NativeLibrary

from .compiled import common_libraries


def main(folder: str, *packages: str) -> int:
    """Build the libraries in a folder, print where each is, and return the exit status."""
    problems: list[str] = []
    for library in (*common_libraries(problems), *map(NativeLibrary.of_ops, packages)):
        try:
            print(library.prebuild(Path(folder)))
        except RuntimeError as error:
            problems.append(f"{library.description} cannot be built: {error}")
    for problem in problems:
        print(f"polycast: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
