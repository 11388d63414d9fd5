"""``polycast build``: it says where the engine is, or why there is none."""

import sys

import pytest
from typer.testing import CliRunner

from polycast.cli import app
from polycast.engine.native import build
from polycast.engine.native.cache import cache_directory


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Return a function that has a script be the compiler, where nothing is built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def behave(code):
        script = tmp_path / "c++"
        script.write_text(f"#!{sys.executable}\nimport sys\nif '--version' not in sys.argv:\n    {code}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    return behave


def test_it_builds_and_prints_where(compiler):
    compiler("open(sys.argv[sys.argv.index('-o') + 1], 'w').write('a library')")
    result = CliRunner().invoke(app, ["build"])
    library = build.find_or_build(cache_directory())
    assert (result.exit_code, result.stdout) == (0, f"{library}\n")
    assert library.read_text() == "a library"


def test_it_does_not_build_again(compiler):
    compiler("open(sys.argv[sys.argv.index('-o') + 1], 'w').write('a library')")
    first, second = (CliRunner().invoke(app, ["build"]) for _ in range(2))
    assert first.stderr == "polycast: building the native engine, once for this torch ...\n"
    assert second.stderr == ""
    assert second.stdout == first.stdout


def test_it_fails_with_the_compiler_and_names_the_log(compiler):
    compiler("sys.exit('no room for the object file')")
    result = CliRunner().invoke(app, ["build"])
    (log,) = cache_directory().rglob("*.log")
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == (
        f"polycast: the native engine cannot be built: the compiler failed with status 1; its output is in {log}. "
        "Once it can do better, `polycast build` tries again."
    )
    assert result.exit_code == 1


def test_it_fails_where_there_is_no_compiler(compiler, monkeypatch):
    compiler("pass")
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = CliRunner().invoke(app, ["build"])
    assert result.stderr == (
        "polycast: the native engine cannot be built: no C++ compiler is found. Install one (c++), or name it in the "
        "variable CXX.\n"
    )
    assert result.exit_code == 1


def test_an_illegal_engine_is_told(compiler, monkeypatch):
    compiler("pass")
    monkeypatch.setenv("POLYCAST_ENGINE", "perhaps")
    result = CliRunner().invoke(app, ["build"])
    assert result.stderr.startswith("polycast: POLYCAST_ENGINE='perhaps' is not legal: expected ")
    assert result.exit_code == 2
