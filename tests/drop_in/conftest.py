"""Fixtures that the tests of this folder share."""

import subprocess
import sys

import pytest

import polycast


@pytest.fixture(scope="session", autouse=True)
def _compiled():
    """Have compiled what is at first use: a program that does it says so, where tests read what programs say."""
    subprocess.run([sys.executable, "-m", "polycast", "build"], capture_output=True, check=False)


@pytest.fixture
def patched():
    with polycast.patch_torch() as it:
        yield it
