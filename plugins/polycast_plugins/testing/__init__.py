"""The conformance suite of backends. It needs pytest.

Subclass :class:`BackendConformance` in a test file, or run
``pytest -p polycast_plugins.testing.options --pyargs polycast_plugins.testing --polycast-backend DEVICE``.
"""

from .conformance import BackendConformance
from .samples import Maker, Sample

__all__ = ["BackendConformance", "Maker", "Sample"]
