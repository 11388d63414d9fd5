"""Checks of what a backend says of itself; a device is used where the backend says that there is one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..plugins.backend import Availability, validate
from .subject import Subject, require


class ContractChecks(Subject):
    """The contract of :class:`polycast.Backend`."""

    def test_contract(self) -> None:
        """The backend has what a backend has, of the right types, as polycast checks it when it loads a plugin."""
        validate(self.loaded(), self.backend)

    def test_availability(self) -> None:
        """The availability check says truly whether the device can be used and, if not, why."""
        answer = answer_of(f"{self.backend}: availability()", self.loaded().availability)
        require(
            answer or answer.reason.strip(),
            f"{self.backend}: availability() says that the device cannot be used and not why. Give the reason: "
            'polycast.Availability(False, "no device is visible")',
        )
        if answer:
            try:
                self.to_device(torch.ones(1))
            except Exception as error:
                raise AssertionError(
                    f"{self.backend}: availability() says that the device can be used, and a tensor cannot be put on "
                    f"it: {type(error).__name__}: {error}. Let it say no, with the reason, where the device is absent."
                ) from error

    def test_supported_dtypes(self) -> None:
        """The supported dtypes are floating point, there is one at least, and each is named once."""
        dtypes = _without_error(f"{self.backend}: supported_dtypes()", self.loaded().supported_dtypes)
        floating = isinstance(dtypes, Sequence) and all(
            isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes
        )
        require(
            floating and dtypes and len(set(dtypes)) == len(dtypes),
            f"{self.backend}: supported_dtypes() must return a sequence of different floating-point dtypes, at least "
            f"one; got {dtypes!r}",
        )

    def test_default_dtype(self) -> None:
        """The default dtype is one of the supported ones, and the backend says that a region can have it."""
        backend = self.loaded()
        supported = backend.supported_dtypes()
        require(
            backend.default_dtype in supported,
            f"{self.backend}: default_dtype {backend.default_dtype} is none of supported_dtypes(): {supported}. Add it "
            "there, or choose another default.",
        )

    def test_dtype_availability(self) -> None:
        """What the backend says of single dtypes agrees with the list of those that it supports."""
        backend = self.loaded()
        supported = backend.supported_dtypes()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8):
            call = f"{self.backend}: dtype_availability({dtype})"
            answer = answer_of(call, lambda dtype=dtype: backend.dtype_availability(dtype))  # type: ignore[misc]
            require(
                answer.available == (dtype in supported),
                f"{call} says {answer.available}, and supported_dtypes() says {dtype in supported}. Let them agree.",
            )
            require(answer or answer.reason.strip(), f"{call} says no and not why. Give the reason.")

    def test_is_capturing(self) -> None:
        """The device does not say that it records a graph while it does not."""
        answer = _without_error(f"{self.backend}: is_capturing()", self.loaded().is_capturing)
        require(
            answer is False,
            f"{self.backend}: is_capturing() must return False while nothing is recorded, got {answer!r}. No cast is "
            "kept while it is true.",
        )


def _without_error(call: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise AssertionError(f"{call} raised {type(error).__name__}: {error}. It must answer and not raise.") from error


def answer_of(call: str, function: Callable[[], Any]) -> Availability:
    """Return the answer of a check of a backend's; fail if it is none."""
    answer = _without_error(call, function)
    require(isinstance(answer, Availability), f"{call} returned {answer!r}, expected a polycast.Availability")
    assert isinstance(answer, Availability)
    return answer
