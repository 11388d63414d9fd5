"""The conformance suite of backends. It needs pytest.

Subclass :class:`BackendConformance` in a test file, or run
``pytest -p polycast_plugins.testing.options --pyargs polycast_plugins.testing --polycast-backend DEVICE``.
"""

from polycast.plugin import Plugin, lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

plugin = Plugin()
