"""The built-in backends pass the conformance suite; absent devices are tested on fake tensors."""

import importlib.metadata

import pytest

import polycast
from polycast_plugins.testing import BackendConformance

BUILT_INS = sorted(
    importlib.metadata.distribution("polycast").entry_points.select(group="polycast.backends").names - {"generic"}
)
OF_REGIONS = {"test_recipe_in_a_region", "test_recipe_in_compiled_code"}
"""The checks of recipes whose result depends on the engine."""


def differing_ops(backend):
    """Return the ops that no suite before has with the same policy, and one of each policy.

    The engines know policies, not devices: an op is cast alike on each.
    """
    before = [polycast.plugin.get_backend(name).policies for name in BUILT_INS[: BUILT_INS.index(backend.device_type)]]
    others = {op for op, policy in backend.policies.items() if all(each.get(op) is not policy for each in before)}
    return sorted(others | set({policy: op for op, policy in sorted(backend.policies.items())}.values()))


class BuiltIn(BackendConformance):
    """The suite, with --full in full: else once where engines do not differ."""

    def pytest_generate_tests(self, metafunc):
        if metafunc.config.getoption("full"):
            super().pytest_generate_tests(metafunc)
            return
        names, name = metafunc.fixturenames, metafunc.function.__name__
        super().pytest_generate_tests(metafunc)
        if "device" not in names or ({"kernel", "recipe"} & {*names} and name not in OF_REGIONS):
            metafunc.definition.add_marker(pytest.mark.parametrize("engine", ["native"], indirect=True))

    def test_op(self, device, subtests, pytestconfig):
        """In a region an op does what it does outside of one with its inputs cast by its policy."""
        few = self.fake and not pytestconfig.getoption("full")
        for op in differing_ops(device.backend) if few else sorted(device.backend.policies):
            with subtests.test(op=op):
                super().test_op(device, op)


for name in BUILT_INS:
    attributes = {"backend": name, "fake": not polycast.is_autocast_available(name)}
    suite = type(f"Test{name.title()}", (BuiltIn,), attributes)
    globals()[suite.__name__] = pytest.mark.usefixtures("engine")(suite)
del suite
