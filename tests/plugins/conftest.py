"""Fixtures that install packages of others, as the tests of the registry do, and for compiled code."""

import pytest
import torch
from tests.core.registry.conftest import distribution, extension, folder, launched, plugin, run

__all__ = ["distribution", "extension", "folder", "launched", "plugin", "run"]


@pytest.fixture
def fresh_dynamo():
    """Forget compiled code before a test and after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
