"""Fixtures that the tests of this folder share."""

import pytest

import polycast


@pytest.fixture
def patched():
    with polycast.patch_torch() as it:
        yield it
