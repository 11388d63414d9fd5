"""``python -m polycast.cli.prebuild FOLDER [PACKAGE ...]``: build the libraries that a wheel contains.

Builds the native engine, its observer and the ops of the named backend packages for the running torch.
``tools/platform_wheel.py`` puts them into a wheel.
"""

import sys
from pathlib import Path

from ..toolchain.library import Library
from ..toolchain.prebuilt import make
from .compiled import OWN

if __name__ == "__main__":
    for library in (*OWN, *map(Library.of_ops, sys.argv[2:])):
        print(make(Path(sys.argv[1]), library))
