"""The options of ``pytest -p polycast_plugins.testing.options --pyargs polycast_plugins.testing``."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("polycast", "conformance of a polycast backend (polycast_plugins.testing)")
    group.addoption("--polycast-backend", metavar="DEVICE", default="", help="the device to test")
    group.addoption(
        "--polycast-fake", action="store_true", help="test on fake tensors, for machines without the device"
    )
    group.addoption(
        "--polycast-expected-failures",
        metavar="FILE",
        help="a file of expected failures: a name and a reason on each line",
    )
