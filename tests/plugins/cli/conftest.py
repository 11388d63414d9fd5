"""Fixtures that run the command line, and install plugins for it."""

import importlib
import sys

import pytest
from typer.testing import CliRunner

from polycast.policy import manifests
from polycast.registry.registry import registry
from polycast_plugins.cli import app


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
def plugin(monkeypatch, tmp_path, rediscover):
    """Return a function that installs a distribution with a plugin for ``ipu``; `name` is that of both."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        metadata = tmp_path / f"{name}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (metadata / "entry_points.txt").write_text(f"[polycast.backends]\nipu = {name}\n")

    return install


@pytest.fixture
def offer(monkeypatch, tmp_path):
    """Return a function that installs a distribution whose plugin has these arguments; `code` is a module of it."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def install(name, arguments, code=""):
        names.extend((name, f"{name}_code"))
        (tmp_path / f"{name}.py").write_text(f"from polycast.plugin import Plugin\nplugin = Plugin({arguments})\n")
        (tmp_path / f"{name}_code.py").write_text(code)
        metadata = tmp_path / f"{name}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (metadata / "entry_points.txt").write_text(f"[polycast.plugins]\n{name} = {name}:plugin\n")
        importlib.invalidate_caches()
        manifests.forget()

    yield install
    manifests.forget()
    for name in names:
        sys.modules.pop(name, None)
