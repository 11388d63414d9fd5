"""Clang compiles the C++ of plugins too."""

import pytest

from polycast.engine.native.engine_library import ENGINE
from polycast.plugin import NativeLibrary
from polycast.toolchain.compiler import compile_library, find_compiler
from polycast_plugins.cli.build import common_libraries

OF_PLUGINS = [each for each in common_libraries() if each != ENGINE]


@pytest.mark.parametrize(
    "wanted",
    [*OF_PLUGINS, NativeLibrary.of_ops("polycast_plugins.quantize.cpu.native")],
    ids=lambda library: library.name,
)
def test_clang_compiles_what_gcc_does(wanted, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "clang++ -fsyntax-only")
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("it is not here")
    status, output = compile_library(compiler, wanted, wanted.read_sources(), tmp_path / "library.so")
    assert status == 0, output
