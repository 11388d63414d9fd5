"""Fixtures that run the command line, and install plugins for it."""

import pytest
from typer.testing import CliRunner

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
