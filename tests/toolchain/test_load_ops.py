"""A backend's own C++: built, kept and checked as the native engine is, and told of where it cannot be.

The compiler of these tests is a script that copies a library, so what it makes is not loaded for its ops.
"""

import os

import pytest
import torch

import polycast
from polycast.engine.native.loading import ENGINE
from polycast.toolchain import load_ops as ops
from polycast.toolchain.build import get_or_build

PACKAGE = "polycast_cpu.native"


@pytest.fixture
def loaded(monkeypatch):
    """Return the libraries that are loaded, with nothing remembered from before."""
    found = []
    monkeypatch.setattr(ops, "_register", found.append)
    ops._answers.clear()
    yield found
    ops._answers.clear()


@pytest.mark.slow
def test_ops_are_built_once_with_a_line_that_says_so(compiler, home, loaded, capfd):
    assert polycast.load_ops(PACKAGE) == polycast.load_ops(PACKAGE) == polycast.Availability(True)
    assert capfd.readouterr().err == f"polycast: building the ops of {PACKAGE}, once for this torch ...\n"
    ops._answers.clear()
    assert polycast.load_ops(PACKAGE)
    assert capfd.readouterr().err == ""
    assert compiler.calls == 1
    (first, second) = loaded
    assert first == second
    assert first.name == "polycast_cpu_native.so"
    assert first.is_relative_to(home)


@pytest.mark.slow
def test_it_is_known_where_they_came_from_before_and_after_they_are_loaded(compiler, home, loaded, monkeypatch):
    monkeypatch.setattr(ops, "_origins", {})
    assert ops.origin(PACKAGE) == "not compiled yet, as `polycast build` does"
    assert compiler.calls == 0
    assert polycast.load_ops(PACKAGE)
    assert ops.origin(PACKAGE) == f"compiled here: {loaded[0]}"
    ops._origins.clear()
    assert ops.origin(PACKAGE) == f"compiled here: {loaded[0]}"


def test_of_ops_that_cannot_be_had_it_is_known_why(compiler, home, loaded, monkeypatch):
    monkeypatch.setattr(ops, "_origins", {})
    compiler.behave(status=3)
    assert not polycast.load_ops(PACKAGE)
    (log,) = home.rglob("*.log")
    assert ops.origin(PACKAGE).startswith(f"none: it failed before; its output is in {log}.")


@pytest.mark.slow
def test_they_do_not_lie_where_the_engine_does(compiler, home, loaded):
    polycast.load_ops(PACKAGE)
    assert loaded[0].parent.parent != get_or_build(home, ENGINE).parent.parent


def test_without_a_compiler_there_are_none_and_the_reason_says_so(home, loaded, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = f"the C++ of {PACKAGE} cannot be loaded: no C++ compiler is found. Install one (c++), or name it in CXX."
    answer = polycast.load_ops(PACKAGE)
    assert (answer.available, answer.reason.replace("the variable ", "")) == (False, said)
    assert loaded == []


@pytest.mark.slow
def test_a_compiler_that_fails_is_told_with_its_log_and_how_to_try_again(compiler, home, loaded):
    compiler.behave(status=3)
    reason = polycast.load_ops(PACKAGE).reason
    (log,) = home.rglob("*.log")
    assert reason.endswith(
        f"the compiler failed with status 3; its output is in {log}. Once it can do better, "
        "remove that file to try again."
    )
    compiler.behave(status=0)
    ops._answers.clear()
    assert (
        f"it failed before; its output is in {log}. Remove that file to try again." in polycast.load_ops(PACKAGE).reason
    )
    log.unlink()
    ops._answers.clear()
    assert polycast.load_ops(PACKAGE)


def test_a_package_without_cpp_is_told():
    assert "its C++ sources are not in" in polycast.load_ops("polycast.policy").reason


def test_a_library_that_does_not_load_is_told(compiler, home, monkeypatch):
    ops._answers.clear()

    def refuse(library):
        raise OSError("undefined symbol: somewhere")

    monkeypatch.setattr(ops, "_register", refuse)
    reason = polycast.load_ops(PACKAGE).reason
    assert reason.startswith(f"the C++ of {PACKAGE} cannot be loaded: ")
    assert reason.endswith(".so does not load: undefined symbol: somewhere. Remove it to have it built again.")
    ops._answers.clear()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has other owners and permissions")
def test_from_a_cache_that_others_can_write_nothing_is_loaded(compiler, home, loaded):
    home.mkdir(mode=0o700)
    home.chmod(0o777)
    with pytest.warns(
        UserWarning, match=f"polycast built the ops of {PACKAGE} for this process alone, as each process"
    ):
        assert polycast.load_ops(PACKAGE)
    assert not loaded[0].is_relative_to(home)
    assert not loaded[0].exists()


def test_the_cpus_ops_register_themselves():
    if not polycast.get_backend("cpu").recipe_availability(polycast.Int8()):
        pytest.skip("this CPU or compiler has no int8")
    assert torch.ops.polycast_cpu.best_isa() in (0, 1, 2)
