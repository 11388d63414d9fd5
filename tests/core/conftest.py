"""The recipe of these tests, which other tests do not see."""

import pytest

from polycast.common import generation
from polycast.policy.recipe import kinds

from .rounding import Rounded


@pytest.fixture(autouse=True)
def _rounded(monkeypatch):
    """Make the recipe known by its name."""
    monkeypatch.setitem(kinds, "rounded", Rounded)
    generation.advance()
