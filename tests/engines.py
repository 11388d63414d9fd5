"""Marks of tests that run on one engine."""

import pytest

NATIVE = [pytest.mark.usefixtures("engine"), pytest.mark.parametrize("engine", ["native"], indirect=True)]
"""Of tests of what is cached: the reference engine caches nothing."""
REFERENCE = [pytest.mark.usefixtures("engine"), pytest.mark.parametrize("engine", ["reference"], indirect=True)]
