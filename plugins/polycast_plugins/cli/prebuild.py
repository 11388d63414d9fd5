"""``python -m polycast_plugins.cli.prebuild FOLDER [PACKAGE ...]``: build a wheel's libraries for the running torch.

They are the native engine, those of plugins, and the ops of the named backend packages. ``tools/platform_wheel.py``
adds them to a wheel.
"""

import sys
from pathlib import Path

from polycast.toolchain.cpp_library import CppLibrary
from polycast.toolchain.prebuilt import build_prebuilt

from .compiled import common_libraries

if __name__ == "__main__":
    for library in (*common_libraries(), *map(CppLibrary.of_ops, sys.argv[2:])):
        print(build_prebuilt(Path(sys.argv[1]), library))
