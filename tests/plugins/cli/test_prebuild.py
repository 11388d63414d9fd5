"""``tools/prebuild.py``: the libraries that it builds for a wheel, and the headers that they are compiled from."""

from pathlib import Path

import pytest
import torch
from tests.core.toolchain.tools import load_tool

import polycast
from polycast.toolchain.compiler import digest_of_headers, find_compiler
from polycast.toolchain.cpp_library import BuildError
from polycast_plugins.cli.build import common_libraries

OPS = polycast.plugin.NativeLibrary.of_ops("polycast_plugins.quantize.cpu.native")


@pytest.fixture
def tool():
    return load_tool("prebuild")


def test_what_cannot_be_imported_or_built_is_reported_and_the_others_are_built(
    offer, tool, monkeypatch, tmp_path, capsys
):
    def build(folder, library):
        if library == OPS:
            raise BuildError("the compiler failed")
        return folder / library.name

    own = common_libraries()
    offer("acme", "libraries=('acme_code:LIBRARY',)", "import acme_runtime")
    monkeypatch.setattr(tool, "build", build)
    assert tool.main(str(tmp_path), OPS.package) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == [str(tmp_path / each.name) for each in own]
    missing, failed = said.err.splitlines()
    assert missing.startswith("polycast: acme_code:LIBRARY cannot be imported. The plugin 'acme' ")
    assert failed == f"polycast: {OPS.description} cannot be built: the compiler failed"


def test_the_exit_status_is_0_if_all_is_built(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "build", lambda folder, library: folder / library.name)
    assert tool.main(str(tmp_path), OPS.package) == 0


def test_the_headers_of_torch_that_a_library_is_compiled_from_are_listed(tool, tmp_path):
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no compiler here")
    source = b"#include <c10/core/Device.h>\n#include <vector>\n"
    headers = tool.headers_of_torch(compiler, OPS, {"acme.cpp": source}, tmp_path)
    assert {"c10/core/Device.h", "c10/core/DeviceType.h"} <= set(headers)
    assert [header for header in headers if not (Path(torch.__file__).parent / "include" / header).is_file()] == []
    assert digest_of_headers(headers) == digest_of_headers(list(headers))
