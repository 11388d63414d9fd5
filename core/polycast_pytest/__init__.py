"""The options of pytest that choose what ``pytest --pyargs polycast.testing`` tests.

pytest imports this at each start where polycast is installed. So it is a package of its own and imports nothing: a
module of polycast's would bring torch with it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("polycast", "conformance of a polycast backend (pytest --pyargs polycast.testing)")
    group.addoption("--polycast-backend", metavar="DEVICE", default="", help="the device whose backend is tested")
    group.addoption("--polycast-fake", action="store_true", help="test on fake tensors, where the device is absent")
    group.addoption(
        "--polycast-expected-failures",
        metavar="FILE",
        help="what the device cannot do: a name and a reason on each line",
    )
