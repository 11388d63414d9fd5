"""The calls of a model under test: ``inputs`` as users pass them, copied for each run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..policy.dtypes import dtype_name
from .values import copied, tensors_in


@dataclass(frozen=True)
class Call:
    """The arguments of a call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, model: object, inputs: object) -> "Call":
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

    def of_model(self, model: torch.nn.Module) -> Any:
        """Call the model with copies of the arguments, because it may write to them."""
        args, kwargs = copied((self.args, dict(self.kwargs)), model)
        return model(*args, **kwargs)

    def __str__(self) -> str:
        """Return the tensors as text: ``float32 (360, 1, 8, 8)``, ``input_ids: int64 (1, 16)``."""
        named = [*tensors_in(list(self.args)), *tensors_in(self.kwargs)]
        parts = []
        for name, tensor in named:
            what = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            parts.append(what if name in ("", "[0]") and len(self.args) == 1 else f"{name}: {what}")
        return ", ".join(parts) or "no tensors"
