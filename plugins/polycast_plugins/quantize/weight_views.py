"""The weights of a model as matrices [N, K], by the names of its parameters."""

from collections.abc import Iterable

import torch

WHOLE, TRANSPOSED = "", "transposed"
"""Views: of a parameter that is the matrix, and of one that is the transposed matrix. Other views are five numbers:
the offset of the matrix in a contiguous parameter, its size, and its strides."""


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
