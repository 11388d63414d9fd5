"""The conformance suite: a class with all checks."""

import pytest

from polycast.plugin import drift_of, find_op

from .contract import ContractChecks
from .feature_checks import FeatureChecks
from .kernel_checks import KernelChecks, kernel_names
from .kernel_options import KernelOptionChecks
from .low_bit import offered_recipes, recipes
from .mixed_dtypes import MixedDtypeChecks
from .op_checks import OpChecks
from .recipe_checks import RecipeChecks
from .regions import RegionChecks
from .subject import read_expected, require


class BackendConformance(
    ContractChecks,
    RegionChecks,
    OpChecks,
    MixedDtypeChecks,
    FeatureChecks,
    KernelChecks,
    RecipeChecks,
    KernelOptionChecks,
):
    """The conformance suite of a backend: subclass it in a test file, under a name that begins with ``Test``.

    A failed check says what the backend does, what is expected and what to do. A file of expected failures names what
    the device cannot do, with the reason; a line of it that is no longer needed fails.

    Attributes:
        backend: the device type.
        fake: check on fake tensors, as if the device were available; for machines without it.
        expected_failures: the path of the file: on each line the name of an op or a test, and the reason.
        samples: arguments for ops that the suite does not know, by op name: functions from a :class:`Maker` to the
            arguments.

    Example:
        >>> from polycast_plugins.testing import BackendConformance
        >>> class TestCpu(BackendConformance):
        ...     backend = "cpu"
        ...     samples = {"acme::scale": lambda make: (make(2, 3), 0.5)}
    """

    def test_expected_failures(self) -> None:
        """Each line of the file of expected failures names a test, an op, a kernel or a recipe."""
        backend = self.get_backend()
        drift = drift_of(backend)
        tested = {name for name in dir(self) if name.startswith("test_")}
        tested |= {
            *kernel_names(backend),
            *recipes(),
            *backend.policies,
            *backend.matched_ops,
            *drift.only_in_torch,
            *drift.excluded_ops,
        }
        stale = [
            name for name in read_expected(self.expected_failures) if name not in tested and not _is_missing_op(name)
        ]
        require(
            not stale,
            f"{self.expected_failures} names what is not an op, a kernel, a recipe or a test of {self.backend}: "
            f"{', '.join(stale)}. Remove or correct these lines.",
        )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize the checks by the ops of the table, the kernels and the recipes."""
        if "op" in metafunc.fixturenames:
            metafunc.parametrize("op", sorted(self.get_backend().policies))
        if "kernel" in metafunc.fixturenames:
            metafunc.parametrize("kernel", sorted(kernel_names(self.get_backend())) or [None])
        if "recipe" in metafunc.fixturenames:
            metafunc.parametrize("recipe", offered_recipes(self.get_backend()) or [None])


def _is_missing_op(name: str) -> bool:
    return name.count(":") == 2 and find_op(name) is None
