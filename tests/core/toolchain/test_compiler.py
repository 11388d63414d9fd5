"""The compiler's command, flags and excerpts of headers."""

import os
import subprocess
import sys
import sysconfig

import pytest

from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain.build import get_or_build
from polycast.toolchain.compiler import FLAGS, _extract_struct, compile_library, find_compiler, first_error
from polycast.toolchain.cpp_library import BuildError

CCACHE = """#!/bin/sh
echo "$@" >> {calls}
exec "$@"
"""


def test_ccache_is_used_if_installed(compiler, home, tmp_path, monkeypatch):
    calls, script = tmp_path / "calls", tmp_path / "bin" / "ccache"
    script.parent.mkdir()
    script.write_text(CCACHE.format(calls=calls))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    library = get_or_build(home, ENGINE)
    (call,) = calls.read_text().splitlines()
    assert call.startswith(compiler.command)
    assert str(library.parent) not in call  # it differs between builds
    assert compiler.calls == 2  # for an object and a library


def test_macos_links_with_undefined_python_symbols(compiler, home, tmp_path, monkeypatch):
    words = tmp_path / "words"
    monkeypatch.setenv("CXX", f'sh -c \'echo "$@" >> {words}; exec {compiler.command} "$@"\' sh')
    monkeypatch.setattr(sys, "platform", "darwin")
    get_or_build(home, ENGINE)
    assert " -shared -undefined dynamic_lookup " in words.read_text()


HEADER = """#pragma once
struct Other {
  int before;
};
#ifdef _WIN32
struct Wanted : public Base {
  TORCH_API Wanted() = default;
#else
struct TORCH_API Wanted : public Base {
#endif
  using Base::Base;
  void release() override {

  }
  int value;
};
struct After {
};
"""


def test_extract_a_struct_from_a_header(tmp_path):
    header = tmp_path / "header.h"
    header.write_text(HEADER)
    assert _extract_struct(header, "Wanted") == (
        "struct TORCH_API Wanted : public Base {\n  using Base::Base;\n  void release() override {\n\n  }\n"
        "  int value;\n};\n"
    )


def test_a_missing_header_or_struct_is_a_build_error(tmp_path):
    header = tmp_path / "header.h"
    with pytest.raises(BuildError, match=r"header.h is missing\. Install torch with its headers\."):
        _extract_struct(header, "Wanted")
    header.write_text("struct Other {\n};\n")
    with pytest.raises(BuildError, match="no struct Wanted is found in .*: this torch is newer than this polycast"):
        _extract_struct(header, "Wanted")


@pytest.mark.parametrize("command", ["c++", "clang++"])
def test_the_error_says_to_install_the_headers_of_python(command, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", f"{command} -fsyntax-only")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("it is not here")
    _, output = compile_library(compiler, ENGINE, ENGINE.read_sources(), tmp_path / "library.so")
    assert first_error(output).endswith("(install Python's headers; on Debian: apt install python3-dev)")
    assert "Python.h" in first_error(output)


@pytest.mark.parametrize("command", ["c++", "g++", "clang++"])
def test_each_compiler_accepts_the_flags(command, monkeypatch):
    monkeypatch.setenv("CXX", command)
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("it is not here")
    nothing = [command, *FLAGS, "-fsyntax-only", "-xc++", os.devnull]
    subprocess.run(nothing, check=True)


def test_clang_compiles_what_gcc_does(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "clang++ -fsyntax-only")
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("it is not here")
    status, output = compile_library(compiler, ENGINE, ENGINE.read_sources(), tmp_path / "library.so")
    assert status == 0, output
