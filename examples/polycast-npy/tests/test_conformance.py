"""The backend conforms: polycast's own suite, on real tensors of the device, under both engines."""

from pathlib import Path

import pytest

from polycast_plugins.testing import BackendConformance


@pytest.mark.usefixtures("engine")
class TestNpy(BackendConformance):
    backend = "npy"
    expected_failures = Path(__file__).parent / "expected_failures.txt"
    samples = {"aten::gelu": lambda make: (make(2, 3),)}
