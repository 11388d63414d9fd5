"""Fixtures that run the command line, and install plugins for it."""

import importlib
import sys

import pytest
from typer.testing import CliRunner

from polycast.policy import manifests
from polycast.registry.registry import registry
from polycast_plugins.cli import app


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An empty working directory."""
    path = tmp_path / "here"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


@pytest.fixture
def polycast_command(monkeypatch):
    """Return a function that runs the command line in this process and returns its result."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        return CliRunner().invoke(app, arguments)

    return call


@pytest.fixture
def rediscover(monkeypatch):
    """Discover backends again, in the environment of the test."""
    monkeypatch.setattr(registry, "_discovered", None)
    monkeypatch.setattr(registry, "ready", {})


@pytest.fixture
def plugin(monkeypatch, distribution, folder, rediscover):
    """Return a function that installs a distribution with a plugin for ``ipu``; `name` is that of both."""
    monkeypatch.syspath_prepend(folder)
    return lambda name, source: distribution(name, {"ipu": name}, {f"{name}.py": source}, "1.5")


@pytest.fixture
def offer(monkeypatch, distribution, folder):
    """Return a function that installs a distribution whose plugin has these arguments; `code` is a module of it."""
    monkeypatch.syspath_prepend(folder)
    names = []

    def install(name, arguments, code=""):
        names.extend((name, f"{name}_code"))
        manifest = f"from polycast.plugin import Plugin\nplugin = Plugin({arguments})\n"
        files = {f"{name}.py": manifest, f"{name}_code.py": code}
        distribution(name, {name: f"{name}:plugin"}, files, "1.5", "polycast.plugins")
        importlib.invalidate_caches()
        manifests.forget()

    yield install
    manifests.forget()
    for name in names:
        sys.modules.pop(name, None)
