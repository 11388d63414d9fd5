"""The backend and the device under test."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from polycast import autocast, autocast_nesting, install
from polycast.plugin import Availability, Backend, check, dtype_name, get_backend, torch_name

from .samples import Sample

_dispatch_keys: Callable[[torch.Tensor], object] = torch_name(
    "torch._C._dispatch_keys", lambda tensor: "", "the conformance suite checks no absent devices on fake tensors"
)


class Subject:
    """The base class of the checks: the backend under test.

    Attributes:
        backend: the device type.
        fake: check on fake tensors, as if the device were available; for machines without it.
        expected_failures: the path of a file with what the device does not support.
        samples: arguments for ops that the suite does not know, by op name.
    """

    backend: str = ""
    fake: bool = False
    expected_failures: Path | str | None = None
    samples: Mapping[str, Sample] = {}

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor on the device. Override it if ``tensor.to(device)`` does not do that."""
        return tensor.to(self.backend)

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the device on the CPU. Override it if ``tensor.cpu()`` does not do that."""
        return tensor.cpu()

    def get_backend(self) -> Backend:
        """Return the backend."""
        if not self.backend:
            raise pytest.UsageError(
                f"{type(self).__name__} names no backend: set the attribute `backend` to its device type, or "
                "run pytest -p polycast_plugins.testing.options --pyargs polycast_plugins.testing "
                "--polycast-backend DEVICE."
            )
        return get_backend(self.backend)

    @contextmanager
    def opened(self) -> Iterator["Device"]:
        """Open the device for a check, with polycast's kernels installed; skip the check if it is absent."""
        backend = self.get_backend()
        available = check(backend)
        if not (available or self.fake):
            pytest.skip(
                f"{backend.device_type} is not available: {available.reason}. Set fake = True (--polycast-fake) to "
                "check it on fake tensors."
            )
        with ExitStack() as stack:
            if self.fake:
                stack.enter_context(mock.patch.object(backend, "availability", return_value=Availability(True)))
                stack.enter_context(_module_of(backend.device_type))
                stack.enter_context(FakeTensorMode())
                if not _autocast_sees_fakes(backend.device_type):
                    pytest.skip(
                        f"torch {torch.__version__} cannot make fake tensors of {backend.device_type} that autocast "
                        "sees: check it on the device."
                    )
            install(backend.device_type)
            yield Device(self, backend)

    @pytest.fixture
    def device(self) -> Iterator["Device"]:
        """The device under test."""
        with self.opened() as device:
            yield device

    @pytest.fixture(autouse=True)
    def _expected_failure(self, request: pytest.FixtureRequest) -> None:
        """Mark a test as xfail if the file of expected failures names it, its op, kernel or recipe."""
        reasons = read_expected(self.expected_failures)
        callspec = getattr(request.node, "callspec", None)
        params = [] if callspec is None else [callspec.params.get(name) for name in ("op", "kernel", "recipe")]
        for name in (request.node.originalname, *params):
            if name in reasons:
                request.applymarker(pytest.mark.xfail(reason=reasons[name], strict=True))


def _autocast_sees_fakes(device_type: str) -> bool:
    try:
        tensor = torch.empty(1, device=device_type)
    except RuntimeError:
        return False
    return "Autocast" in str(_dispatch_keys(tensor))


@contextmanager
def _module_of(device_type: str) -> Iterator[None]:
    """Add ``torch.<device>`` if it is missing: FakeTensorMode asks it whether the device is initialized."""
    if hasattr(torch, device_type):
        yield
        return
    setattr(torch, device_type, SimpleNamespace(is_initialized=lambda: False, is_available=lambda: False))
    try:
        yield
    finally:
        delattr(torch, device_type)


class Device:
    """An open device: makes tensors and regions."""

    def __init__(self, subject: Subject, backend: Backend) -> None:
        self.backend = backend
        self.type = backend.device_type
        self.fake = subject.fake
        self._subject = subject

    def region(self, dtype: torch.dtype | None = None, **settings: Any) -> autocast:
        """Return a region for the device."""
        return autocast(self.type, dtype, **settings)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor on the device."""
        if self.fake:
            return torch.empty_like(tensor, device=self.type)
        return self._subject.to_device(tensor)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the device on the CPU."""
        return self._subject.to_cpu(tensor.detach())

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return a float32 tensor with values between 0.1 and 0.9; see :class:`polycast_plugins.testing.Maker`."""
        return self.put(torch.rand(shape) * 0.8 + 0.1)

    def spd(self, size: int) -> torch.Tensor:
        """Return a symmetric, positive definite float32 matrix."""
        matrix = torch.rand(size, size)
        return self.put(matrix @ matrix.T + size * torch.eye(size))

    def signs(self, *shape: int) -> torch.Tensor:
        """Return a float32 tensor of ones, some of them negative."""
        signs = torch.ones(shape)
        signs.view(-1)[::2] = -1
        return self.put(signs)

    def integers(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return a tensor of these integers."""
        return self.put(torch.tensor(values, dtype=dtype))

    def skip_if_fake(self, what: str) -> None:
        """Skip a check that fake tensors cannot make."""
        if self.fake:
            pytest.skip(f"not on fake tensors: {what}")

    def fast_dtypes(self) -> list[torch.dtype]:
        """Return the fast dtypes of the device, the default one first."""
        others = [dtype for dtype in self.backend.supported_dtypes() if dtype is not self.backend.default_dtype]
        return [self.backend.default_dtype, *others]

    def state(self) -> dict[str, object]:
        """Return this thread's autocast state of the device."""
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        return {
            "enabled": torch.is_autocast_enabled(self.type),
            "dtype": torch.get_autocast_dtype(self.type),
            "nesting": autocast_nesting(self.type),
            "torch's nesting": depth,
            "cache enabled": torch.is_autocast_cache_enabled(),
        }

    def must_be(self, expected: Mapping[str, object], when: str, found: Mapping[str, object] | None = None) -> None:
        """Fail unless a state, by default this thread's, has the expected values."""
        found = self.state() if found is None else found
        wrong = [
            f"{name} is {found[name]}, expected {value}" for name, value in expected.items() if found[name] != value
        ]
        if wrong:
            raise AssertionError(f"the autocast state of {self.type} {when}: {'; '.join(wrong)}")


def require(condition: object, message: str) -> None:
    """Fail with a message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def describe(value: object) -> str:
    """Return the dtype and the shape of a tensor as text; the repr of anything else."""
    return f"{dtype_name(value.dtype)}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def read_expected(path: Path | str | None) -> dict[str, str]:
    """Return the reasons of a file of expected failures, by name.

    Args:
        path: the file; None: no file. Each line is the name of an op or a test, white space and the reason. Empty
            lines and lines that begin with ``#`` are skipped.

    Raises:
        ValueError: a line has no reason, or repeats a name.
    """
    reasons: dict[str, str] = {}
    if path is None:
        return reasons
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, *reason = line.split(maxsplit=1)
        if not reason:
            raise ValueError(
                f"{path}, line {number}: {name!r} has no reason. Write it after the name, on the same line."
            )
        if name in reasons:
            raise ValueError(f"{path}, line {number}: {name!r} is named twice. Remove one of the lines.")
        reasons[name] = reason[0].strip()
    return reasons
