"""Fixtures: a compiler that is a script, an empty cache, and the choice of an engine."""

import sys

import pytest

from polycast.engine import choice, installation
from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain.build import get_or_build
from polycast.toolchain.cache_folder import cache_directory

COMPILER = """#!{python}
import os, shutil, sys
if "--version" in sys.argv:
    print("test compiler 1.0")
    raise SystemExit
with open({calls!r}, "a") as calls:
    calls.write("called\\n")
{also}
if {status}:
    print("no room for the object file")
    raise SystemExit({status})
shutil.copy({library!r}, sys.argv[sys.argv.index("-o") + 1])
"""


@pytest.fixture(scope="session")
def library():
    return get_or_build(cache_directory(), ENGINE)


class Compiler:
    """A compiler that can be made to fail, and counts its calls."""

    def __init__(self, folder, library):
        self._folder, self._library = folder, library
        self._calls = folder / "calls"
        self.behave(status=0)

    def behave(self, status, also=""):
        script = self._folder / "c++"
        values = {"python": sys.executable, "calls": str(self._calls), "library": str(self._library)}
        script.write_text(COMPILER.format(status=status, also=also, **values))
        script.chmod(0o755)
        self.command = str(script)

    @property
    def calls(self):
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0


@pytest.fixture
def compiler(library, tmp_path_factory, monkeypatch):
    made = Compiler(tmp_path_factory.mktemp("compiler"), library)
    monkeypatch.setenv("CXX", made.command)
    return made


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "polycast"


@pytest.fixture
def wanted(monkeypatch):
    """Return a function that sets POLYCAST_ENGINE and chooses an engine."""

    def choose(name):
        installation.forget_choice()
        monkeypatch.setenv("POLYCAST_ENGINE", name)
        return choice.choose_engine()

    yield choose
    installation.forget_choice()
