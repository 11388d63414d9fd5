"""The calls of a model under test: ``inputs`` as users pass them, copied for each run."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..policy.dtypes import dtype_name
from .values import copied, tensors_in


@dataclass(frozen=True)
class ModelCall:
    """The arguments of a call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, model: object, inputs: object) -> "ModelCall":
        """Return a call with a tensor, a tuple of arguments or a dict of keyword arguments.

        Raises:
            TypeError: `inputs` is none of these, or `model` is not a module.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(inputs, torch.Tensor):
            return cls((inputs,), {})
        if isinstance(inputs, tuple):
            return cls(inputs, {})
        if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
            return cls((), dict(inputs))
        raise TypeError(
            "inputs must be a tensor, a tuple of arguments or a dict of keyword arguments for the model's forward; got "
            f"{type(inputs).__name__}. Put a single argument of another type into a tuple: (argument,)."
        )

    def run(self, model: torch.nn.Module) -> Any:
        """Call the model with copies of the arguments, because it may write to them.

        Raises:
            TypeError: the model's forward takes other arguments.
        """
        args, kwargs = copied((self.args, dict(self.kwargs)), model)
        try:
            return model(*args, **kwargs)
        except TypeError as error:
            self._check_fits(model, error)
            raise

    def _check_fits(self, model: torch.nn.Module, cause: TypeError) -> None:
        """Raise TypeError if the signature of the model's forward takes other arguments."""
        try:
            signature = inspect.signature(model.forward)
        except (TypeError, ValueError):  # it has none
            return
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise TypeError(
                f"{type(model).__name__}.forward{signature} does not take these inputs, {self}: {error}. A tuple has "
                "the arguments of one call. If a loader also returns targets, pass what the model takes: "
                "(x for x, _ in loader)."
            ) from cause

    def __str__(self) -> str:
        """Return the tensors as text: ``float32 (360, 1, 8, 8)``, ``input_ids: int64 (1, 16)``."""
        named = [*tensors_in(list(self.args)), *tensors_in(self.kwargs)]
        parts = []
        for name, tensor in named:
            what = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            parts.append(what if name in ("", "[0]") and len(self.args) == 1 else f"{name}: {what}")
        return ", ".join(parts) or "no tensors"

    def structure(self) -> dict[str, str]:
        """Return by path the dtype of each tensor."""
        named = [*tensors_in(list(self.args), "argument "), *tensors_in(self.kwargs)]
        return {name: dtype_name(tensor.dtype) for name, tensor in named}


Calls: TypeAlias = tuple[ModelCall, ...]


def calls_of(model: object, data: object, what: str = "data", like: Calls = ()) -> Calls:
    """Return the calls of a model with one call's inputs, or with each batch of an iterable.

    A batch is a tensor, a tuple or list of arguments, or a dict of keyword arguments. The iterable is read once.

    Args:
        model: the model.
        data: the inputs, or the iterable.
        what: the name of the argument, for messages.
        like: other calls, of the same structure.

    Raises:
        TypeError: `data` or a batch is of another type, or `model` is not a module.
        ValueError: there is no batch, or a batch has another structure than the first, or than `like`.
    """
    first, name = (like[0], "data") if like else (None, "batch 0")
    if isinstance(data, (torch.Tensor, tuple, Mapping)) or not isinstance(data, Iterable) or isinstance(data, str):
        call = ModelCall.of(model, data)
        _check_structure(first, call, what, name)
        return (call,)
    calls: list[ModelCall] = []
    for number, batch in enumerate(data):
        try:
            call = ModelCall.of(model, tuple(batch) if isinstance(batch, list) else batch)
        except TypeError as error:
            raise TypeError(f"batch {number} of {what}: {error}") from None
        first = first or call
        _check_structure(first, call, f"batch {number} of {what}", name)
        calls.append(call)
    if not calls:
        raise ValueError(f"{what} has no batches: pass one call's inputs, or an iterable with at least one batch")
    return tuple(calls)


def tensors_of(model: torch.nn.Module, calls: Iterable[ModelCall]) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model, and the tensors in its inputs."""
    inputs = (tensor for call in calls for _, tensor in tensors_in((call.args, call.kwargs)))
    return [*model.parameters(), *model.buffers(), *inputs]


def device_of(model: torch.nn.Module, calls: Iterable[ModelCall]) -> str:
    """Return the device type of a model's first tensor, or else of its inputs' first.

    Raises:
        ValueError: it is on meta.
    """
    device = next(iter(tensors_of(model, calls)), torch.empty(0)).device.type
    if device == "meta":
        raise ValueError("the model is on meta: name the device that it is meant for, as device_type='cpu'")
    return device


def _check_structure(first: ModelCall | None, call: ModelCall, what: str, than: str) -> None:
    """Raise ValueError if a call has another structure than the first."""
    if first is None:
        return
    before, now = first.structure(), call.structure()
    for name in {**before, **now}:
        expected, got = before.get(name, "no tensor"), now.get(name, "no tensor")
        if expected != got:
            raise ValueError(
                f"{what} has another structure than {than}: {name} is {got}, and {expected} in {than}. Give all "
                "batches the same arguments in the same dtypes; sizes may differ."
            )


def text_of(calls: Calls) -> str:
    """Return the tensors of the first call as text, and the number of other calls."""
    more = len(calls) - 1
    return str(calls[0]) + (f" and {more} more {'batch' if more == 1 else 'batches'}" if more else "")
