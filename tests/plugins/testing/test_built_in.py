"""The built-in backends pass the conformance suite; absent devices are tested on fake tensors."""

import importlib.metadata

import pytest

import polycast
from polycast_plugins.testing import BackendConformance

BUILT_INS = sorted(importlib.metadata.distribution("polycast").entry_points.select(group="polycast.backends").names)

for name in BUILT_INS:
    attributes = {"backend": name, "fake": not polycast.is_autocast_available(name)}
    suite = type(f"Test{name.title()}", (BackendConformance,), attributes)
    globals()[suite.__name__] = pytest.mark.usefixtures("engine")(suite)
del suite
