"""Fixtures that the tests of this folder share."""

import subprocess
import sys

import pytest

import polycast


@pytest.fixture(scope="session")
def _build():
    """Build the C++ once: a program that builds it at first use says so, where tests read what programs say."""
    subprocess.run([sys.executable, "-m", "polycast", "build"], capture_output=True, check=False)


@pytest.fixture(autouse=True)
def _built_for_programs(request):
    """Build before the tests that run programs."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("_build")


@pytest.fixture
def patched():
    with polycast.patch_torch() as it:
        yield it
