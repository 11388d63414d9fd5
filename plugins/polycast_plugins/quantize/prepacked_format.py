"""`PrepackedFormat`: identifies how a weight was prepacked."""

from dataclasses import dataclass
from typing import Any

import torch

from polycast.plugin import Extension, LowBitKernel, Recipe


@dataclass(frozen=True)
class PrepackedFormat:
    """Identifies the kernel and the recipe of a prepacked weight, in text that is the same in all processes.

    Attributes:
        device: the device type.
        backend: the class of the backend, or of the extension, that has the kernel, and the version of the
            distribution that supplies it.
        recipe: the text of the recipe.
        op: an op that uses it, by its name in the dispatcher.
        kernel: the class of the kernel, what it says of its layout, and its constants, such as the instruction set.
    """

    device: str
    backend: str
    recipe: str
    op: str
    kernel: str


def format_of(given: Extension, package: str, recipe: Recipe, op: str, kernel: LowBitKernel) -> PrepackedFormat:
    """Return the format of a kernel's prepacked weights, given the name and version of the kernel's package."""
    constants = ", ".join(_constants(kernel))
    layout = "" if kernel.prepack_key is None else f" ({_text(kernel.prepack_key)})"
    return PrepackedFormat(
        given.device_type,
        f"{_text(type(given))}{f' {package}' if package else ''}",
        recipe.text,
        op,
        f"{_text(type(kernel))}{layout}{f', {constants}' if constants else ''}",
    )


def _constants(kernel: LowBitKernel) -> list[str]:
    """Return the constants of a kernel, with the names that they have in its operator."""
    values = [_text(value) for value in kernel.constants]
    if kernel.operator is None or not values:
        return values
    arguments = kernel.operator._schema.arguments[-len(values) :]
    return [f"{argument.name}={value}" for argument, value in zip(arguments, values, strict=True)]


def _text(value: Any) -> str:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    known = isinstance(value, (bool, int, float, str, torch.dtype, type(None)))
    return repr(value) if known else _text(type(value))  # the text of others may have an address
