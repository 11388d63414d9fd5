"""The weights of ops and of models as matrices [N, K], a row for each output feature, and their calibration."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from polycast.plugin import LowBitKernel, Plan, Recipe

WHOLE, TRANSPOSED = "", "transposed"
"""Views: of a parameter that is the matrix, and of one that is the transposed matrix. Other views are five numbers:
the offset of the matrix in a contiguous parameter, its size, and its strides."""
_IS_TRANSPOSED = {"aten::linear": False, "aten::matmul": True, "aten::mm": True, "aten::addmm": True}
"""For each op whose weight is a matrix, whether that is stored as [K, N]."""


def matrix_of(op: str, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight of an op as a matrix [N, K], a row for each output feature; None if it is no matrix."""
    is_transposed = _IS_TRANSPOSED.get(op)
    if is_transposed is None or weight.dim() != 2:
        return None
    return weight.t() if is_transposed else weight


def activations_of(op: str, args: Sequence[Any]) -> torch.Tensor:
    """Return the activations [..., K] among the arguments of an op whose weight is a matrix."""
    activations: torch.Tensor = args[1 if op == "aten::addmm" else 0]
    return activations


def product_arguments(op: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
    """Return arguments of an op for the product of activations [M, K] by its weight, without a bias."""
    if op == "aten::linear":
        return x, weight, None
    return (x.new_zeros(weight.shape[1]), x, weight, 1, 1) if op == "aten::addmm" else (x, weight)


def _calibration_of(recipe: Recipe) -> Any:
    """Return the calibration of a recipe, or None.

    Raises:
        RuntimeError: the recipe was read from text, in compiled code, and this process lacks the calibration.
    """
    if getattr(recipe, "calibration", None) is None:
        return None
    calibration = recipe.known("calibration")
    if calibration is None:
        raise RuntimeError(
            f"{recipe!r} is in compiled code of another process, and this process does not have its calibration: load "
            "it with polycast.Calibration.load, and make a recipe of it, before the code runs"
        )
    return calibration


def describe(recipe: Recipe, kernel: LowBitKernel, op: str, weight: torch.Tensor) -> str:
    """Return whether a weight, which may be fake, is calibrated; "" if that is unknown, or there is no calibration."""
    calibration = _calibration_of(recipe)
    matrix = matrix_of(op, weight)
    if calibration is None or Plan.is_special(weight):
        return ""
    if matrix is None or not kernel.equalizes:
        return "not calibrated: the kernel takes no factors"
    text: str = calibration.describe(matrix, kernel.levels)
    return text


def checked_prepack(
    kernel: LowBitKernel, recipe: Recipe, op: str
) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...] | None]:
    """Return a kernel's prepack() with what the recipe's calibration has for the weight, and a check of its result.

    The result is usable in every grad and inference mode.
    """

    def prepack(weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        with torch.inference_mode(False), torch.no_grad():
            detached = weight.detach()
            calibration = _calibration_of(recipe) if kernel.equalizes else None
            matrix = matrix_of(op, detached)
            given = (
                () if calibration is None or matrix is None else calibration.prepack_arguments(matrix, kernel.levels)
            )
            kernel_prepack: Callable[..., Any] = kernel.prepack
            prepacked = kernel_prepack(detached, *given)
            if isinstance(prepacked, torch.Tensor):  # which tuple() would split into rows
                raise TypeError(f"{type(kernel).__name__}.prepack must return a tuple of tensors or None, got a tensor")
            return tuple(prepacked or ()) or None

    return prepack


def parameters_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model by name.

    A tied parameter has an entry for each of its names. Those of a compiled model have their names in the model itself.
    """
    named = model.named_parameters(remove_duplicate=False)
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in named}


def first_of(texts: Iterable[str], separator: str = ", ", limit: int = 3) -> str:
    """Join the first texts, and say how many others there are."""
    given = list(texts)
    shown, others = separator.join(given[:limit]), len(given) - limit
    return f"{shown}{separator.strip(', ')} and {others} more" if others > 0 else shown


def view_of(matrix: torch.Tensor, parameter: torch.Tensor) -> str | None:
    """Return how a matrix lies in a parameter; None if that cannot be said."""
    for view, whole in ((WHOLE, parameter), (TRANSPOSED, parameter.t() if parameter.dim() == 2 else parameter)):
        if _layout(matrix) == _layout(whole):
            return view
    if not parameter.is_contiguous():
        return None
    numbers = matrix.storage_offset() - parameter.storage_offset(), *matrix.shape, *matrix.stride()
    return ",".join(map(str, numbers))


def matrix_in(parameter: torch.Tensor, view: str) -> torch.Tensor:
    """Return the matrix in a parameter, given how it lies there; see `view_of`.

    Raises:
        ValueError: the text is no view of the parameter.
    """
    plain = parameter.detach()
    if view in (WHOLE, TRANSPOSED):
        return plain if view == WHOLE else plain.t()
    try:
        offset, rows, columns, *strides = map(int, view.split(","))
        flat = plain.contiguous().flatten()
        ends = [(rows - 1) * strides[0], (columns - 1) * strides[1]]
        if offset < 0 or offset + sum(ends) >= len(flat):
            raise IndexError(f"it ends at {offset + sum(ends)}")
        return flat.as_strided((rows, columns), strides, flat.storage_offset() + offset)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"{view!r} is no view of a parameter of the size {tuple(parameter.shape)}") from error


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()
