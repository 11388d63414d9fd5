"""The recipe of these tests, which other tests do not see, and ops of other libraries."""

import contextlib

import pytest
import torch

from polycast.common import generation
from polycast.policy.recipe import kinds

from .rounding import Rounded


@pytest.fixture(autouse=True)
def _rounded(monkeypatch):
    """Make the recipe known by its name."""
    monkeypatch.setitem(kinds, "rounded", Rounded)
    generation.advance()


@pytest.fixture
def define():
    """Return a function that defines ops of another library, until the test ends.

    Their kernel returns twice its first argument, unless another is given.
    """
    with contextlib.ExitStack() as libraries:

        def make(*schemas, kernel=lambda x, *rest, **keywords: x + x):
            library = libraries.enter_context(torch.library._scoped_library("polycast_test", "FRAGMENT"))
            for schema in schemas:
                library.define(schema)
                library.impl(schema.partition("(")[0], kernel, "CompositeExplicitAutograd")
            return library

        yield make
