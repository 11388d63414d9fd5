"""Checks of a backend's attributes and answers; they use the device if the backend says that it is available."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polycast.plugin import Availability

from .subject import Subject, require


class ContractChecks(Subject):
    """The contract of :class:`polycast.plugin.Backend`."""

    def test_contract(self) -> None:
        """The backend has all attributes, of the right types, which polycast checks when it loads or registers one."""
        self.get_backend()

    def test_availability(self) -> None:
        """The availability check is right, and gives a reason if the device cannot be used."""
        answer = answer_of(f"{self.backend}: availability()", self.get_backend().availability)
        require(
            answer or answer.reason.strip(),
            f"{self.backend}: availability() says that the device cannot be used and gives no reason. Give one: "
            'polycast.plugin.Availability(False, "no device is visible")',
        )
        if answer:
            try:
                self.to_device(torch.ones(1))
            except Exception as error:
                raise AssertionError(
                    f"{self.backend}: availability() says that the device can be used, and a tensor cannot be put on "
                    f"it: {type(error).__name__}: {error}. Return Availability(False, reason) where it is absent."
                ) from error

    def test_supported_dtypes(self) -> None:
        """The supported dtypes are floating point, at least one, without duplicates."""
        dtypes = _without_error(f"{self.backend}: supported_dtypes()", self.get_backend().supported_dtypes)
        floating = isinstance(dtypes, Sequence) and all(
            isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes
        )
        require(
            floating and dtypes and len(set(dtypes)) == len(dtypes),
            f"{self.backend}: supported_dtypes() must return a sequence of different floating-point dtypes, at least "
            f"one; got {dtypes!r}",
        )

    def test_default_dtype(self) -> None:
        """The default dtype is one of the supported ones."""
        backend = self.get_backend()
        supported = backend.supported_dtypes()
        require(
            backend.default_dtype in supported,
            f"{self.backend}: default_dtype {backend.default_dtype} is not in supported_dtypes(): {supported}. Add it "
            "there, or choose another default.",
        )

    def test_dtype_availability(self) -> None:
        """dtype_availability() agrees with supported_dtypes()."""
        backend = self.get_backend()
        supported = backend.supported_dtypes()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8):
            call = f"{self.backend}: dtype_availability({dtype})"
            answer = answer_of(call, lambda dtype=dtype: backend.dtype_availability(dtype))  # type: ignore[misc]
            require(
                answer.available == (dtype in supported),
                f"{call} says {answer.available}, and supported_dtypes() says {dtype in supported}. Make them agree.",
            )
            require(answer or answer.reason.strip(), f"{call} says no and gives no reason. Give one.")

    def test_is_capturing(self) -> None:
        """is_capturing() is False while no graph is captured."""
        answer = _without_error(f"{self.backend}: is_capturing()", self.get_backend().is_capturing)
        require(
            answer is False,
            f"{self.backend}: is_capturing() must return False while no graph is captured, got {answer!r}. No "
            "casts are cached while it is true.",
        )


def _without_error(call: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise AssertionError(f"{call} raised {type(error).__name__}: {error}. It must not raise.") from error


def answer_of(call: str, function: Callable[[], Any]) -> Availability:
    """Return the Availability that a backend's check returns; fail if it returns anything else."""
    answer = _without_error(call, function)
    require(isinstance(answer, Availability), f"{call} returned {answer!r}, expected a polycast.plugin.Availability")
    assert isinstance(answer, Availability)
    return answer
