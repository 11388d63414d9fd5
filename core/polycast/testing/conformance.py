"""The suite: all checks in one class to subclass."""

import pytest

from ..engine.installation import torch_ops
from ..policy.schemas import find_op
from . import expected
from .casts import CastChecks
from .compiling import CompileChecks
from .contract import ContractChecks
from .functions import FunctionChecks
from .imports import ImportChecks
from .kernels import KernelChecks, kernel_names
from .ops import OpChecks
from .recipes import RECIPES, RecipeChecks
from .regions import RegionChecks
from .subject import require


class BackendConformance(
    ContractChecks,
    RegionChecks,
    OpChecks,
    CastChecks,
    FunctionChecks,
    CompileChecks,
    KernelChecks,
    RecipeChecks,
    ImportChecks,
):
    """The conformance suite of a backend: subclass it in a test file, under a name that begins with ``Test``.

    A check that fails says what the backend does, what is expected of it and what to do. What a device cannot do is
    named in a file of expected failures, with the reason; a line of that file that is no longer needed is a failure.

    Attributes:
        backend: the device type whose backend is tested.
        fake: check the rules on fake tensors, and take the device as available; for where the device is absent.
        expected_failures: the path of the file: an op or a test on each line, white space, and the reason.
        samples: arguments for ops of the table that the suite does not know, by op name: functions that take a
            :class:`Maker` and return the arguments.

    Example:
        >>> from polycast.testing import BackendConformance
        >>> class TestCpu(BackendConformance):
        ...     backend = "cpu"
        ...     samples = {"acme::scale": lambda make: (make(2, 3), 0.5)}
    """

    def test_expected_failures(self) -> None:
        """Each line of the file of expected failures names something that is tested."""
        backend = self.loaded()
        tested = {name for name in dir(self) if name.startswith("test_")}
        tested |= {*kernel_names(backend), *RECIPES, *backend.policies, *torch_ops(self.backend)}
        stale = [
            name
            for name in expected.read(self.expected_failures)
            if name not in tested and not _is_op_of_another_torch(name)
        ]
        require(
            not stale,
            f"{self.expected_failures} names what is no op, no kernel, no recipe and no test of {self.backend}: "
            f"{', '.join(stale)}. Remove or correct these lines.",
        )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each op of the table, of each kernel and of each recipe."""
        if "op" in metafunc.fixturenames:
            metafunc.parametrize("op", sorted(self.loaded().policies))
        if "kernel" in metafunc.fixturenames:
            metafunc.parametrize("kernel", sorted(kernel_names(self.loaded())) or [None])
        if "recipe" in metafunc.fixturenames:
            metafunc.parametrize("recipe", RECIPES)


def _is_op_of_another_torch(name: str) -> bool:
    """Say whether a name is that of an op, not of a kernel, that the running torch lacks."""
    return name.count(":") == 2 and find_op(name) is None
