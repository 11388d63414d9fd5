"""Fixtures that install packages of others, as the tests of the registry do."""

from tests.core.registry.conftest import distribution, extension, folder, launched, plugin, run

__all__ = ["distribution", "extension", "folder", "launched", "plugin", "run"]
