"""`load_ops`: building and loading a backend's C++, and the reasons for failures.

The compiler of these tests is a script that copies another library, so no ops are registered.
"""

import pytest
import torch

import polycast
from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain import load
from polycast.toolchain.build import get_or_build
from polycast.toolchain.prebuilt import no_compiler

PACKAGE = "acme_ops.native"
LIBRARY = load.BuildableLibrary.of_ops(PACKAGE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with the package, which has a C++ file."""
    folder = tmp_path_factory.mktemp("installed")
    native = folder.joinpath(*PACKAGE.split("."))
    native.mkdir(parents=True)
    for each in (native, native.parent):
        (each / "__init__.py").touch()
    (native / "ops.cpp").touch()
    return folder


@pytest.fixture(autouse=True)
def _importable(installed, monkeypatch):
    monkeypatch.syspath_prepend(installed)


@pytest.fixture
def loaded(monkeypatch):
    """Return the paths of libraries that are loaded from now on."""
    found = []
    monkeypatch.setattr(load, "_register_ops", found.append)
    load._ops.clear()
    yield found
    load._ops.clear()


@pytest.mark.slow
def test_ops_are_built_once_with_a_message(compiler, home, loaded, capfd):
    assert polycast.plugin.load_ops(PACKAGE) == polycast.plugin.load_ops(PACKAGE) == polycast.plugin.Availability(True)
    assert capfd.readouterr().err.startswith(
        f"polycast: building the ops of {PACKAGE}, once for this torch, in about half a minute"
    )
    load._ops.clear()
    assert polycast.plugin.load_ops(PACKAGE)
    assert capfd.readouterr().err == ""
    assert compiler.calls == 1
    (first, second) = loaded
    assert first == second
    assert first.name == "acme_ops_native.so"
    assert first.is_relative_to(home)


@pytest.mark.slow
def test_origin_before_and_after_loading(compiler, home, loaded, monkeypatch):
    monkeypatch.setattr(load, "_origins", {})
    assert LIBRARY.find() is None
    assert compiler.calls == 0
    assert polycast.plugin.load_ops(PACKAGE)
    assert LIBRARY.find() == f"compiled here: {loaded[0]}"
    load._origins.clear()
    assert LIBRARY.find() == f"compiled here: {loaded[0]}"


def test_origin_of_ops_that_failed_to_build(compiler, home, loaded, monkeypatch):
    monkeypatch.setattr(load, "_origins", {})
    compiler.behave(status=3)
    assert not polycast.plugin.load_ops(PACKAGE)
    (log,) = home.rglob("*.log")
    with pytest.raises(RuntimeError, match=f"^it failed before; its output is in {log}\\."):
        LIBRARY.find()


@pytest.mark.slow
def test_ops_and_the_engine_have_separate_folders(compiler, home, loaded):
    polycast.plugin.load_ops(PACKAGE)
    assert loaded[0].parent.parent != get_or_build(home, ENGINE).parent.parent


def test_the_reason_without_a_compiler(home, loaded, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    answer = polycast.plugin.load_ops(PACKAGE)
    assert (answer.available, answer.reason) == (False, f"the C++ of {PACKAGE} cannot be loaded: {no_compiler()}")
    assert loaded == []


@pytest.mark.slow
def test_the_reason_of_a_failed_build_has_the_log_and_how_to_retry(compiler, home, loaded):
    compiler.behave(status=3, also='print("ops.cpp:1:9: error: no room\\nops.cpp:2:1: error: another")')
    reason = polycast.plugin.load_ops(PACKAGE).reason
    (log,) = home.rglob("*.log")
    assert reason.endswith(
        f"the compiler failed with status 3: ops.cpp:1:9: error: no room; its output is in {log}. When the cause is "
        "fixed, remove that file to try again."
    )
    compiler.behave(status=0)
    load._ops.clear()
    assert (
        f"it failed before: ops.cpp:1:9: error: no room; its output is in {log}. Remove that file to try "
        "again." in polycast.plugin.load_ops(PACKAGE).reason
    )
    log.unlink()
    load._ops.clear()
    assert polycast.plugin.load_ops(PACKAGE)


@pytest.mark.parametrize("files", [[], ["kernels.h"]], ids=["nothing", "headers"])
def test_a_package_without_cpp_is_told_that_the_sources_are_its_own(files, tmp_path, monkeypatch):
    package = f"acme_without_{len(files)}_headers"
    (tmp_path / package).mkdir()
    for name in ["__init__.py", *files]:
        (tmp_path / package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    reason = polycast.plugin.load_ops(package).reason
    missing = f"there are headers and no .cpp file in {package}" if files else f"its C++ sources are not in {tmp_path}"
    assert missing in reason
    assert f"They belong to the distribution of {package}: if that is yours, list *.cpp and *.h in its pack" in reason


OPS_WITH_ATEN = """
#include <ATen/ATen.h>
#include <torch/library.h>

TORCH_LIBRARY(acme_aten, m) {
  m.def("twice(Tensor x) -> Tensor", [](const at::Tensor& x) { return at::add(x, at::ones_like(x) * x); });
}
"""


@pytest.mark.slow
def test_ops_may_include_all_of_aten(tmp_path, monkeypatch, home):
    package = tmp_path / "acme_with_aten"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ops.cpp").write_text(OPS_WITH_ATEN)
    monkeypatch.syspath_prepend(tmp_path)
    assert polycast.plugin.load_ops("acme_with_aten") == polycast.plugin.Availability(True)
    assert torch.ops.acme_aten.twice(torch.tensor([1.0, 2.0])).tolist() == [2.0, 4.0]
