"""The pytest options of ``pytest --pyargs polycast.testing``.

pytest imports this package in every run where polycast is installed. It is outside of polycast, because importing
polycast imports torch.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("polycast", "conformance of a polycast backend (pytest --pyargs polycast.testing)")
    group.addoption("--polycast-backend", metavar="DEVICE", default="", help="the device to test")
    group.addoption(
        "--polycast-fake", action="store_true", help="test on fake tensors, for machines without the device"
    )
    group.addoption(
        "--polycast-expected-failures",
        metavar="FILE",
        help="a file of expected failures: a name and a reason on each line",
    )
