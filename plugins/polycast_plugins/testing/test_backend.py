"""The conformance suite of the backend that ``--polycast-backend`` names."""

from pathlib import Path

import pytest

from polycast_plugins.testing import BackendConformance


class TestBackend(BackendConformance):
    """The backend of ``--polycast-backend``."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Set the attributes from the options, and parametrize the checks."""
        cls, option = type(self), metafunc.config.getoption
        cls.backend = option("polycast_backend")
        cls.fake = option("polycast_fake")
        file = option("polycast_expected_failures")
        cls.expected_failures = None if file is None else Path(file)
        super().pytest_generate_tests(metafunc)
