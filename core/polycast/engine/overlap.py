"""Writes to casts, and whether two tensors share memory."""

import torch

UNWRITTEN, WRITTEN, RECORDED, CONFLICT = range(4)
"""Writes to a cast: none; some; some with autograd history; some while its argument was written, too."""


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether writing to one tensor may change the other.

    Exact, except for tensors without real memory and views with elements of another size: these overlap if their ranges
    of memory do.
    """
    if one is other:
        return True
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    try:
        if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
            return False
    except (NotImplementedError, RuntimeError):  # of a subclass or a functorch wrapper, which has no storage
        return False
    (first, end), (other_first, other_end) = _range(one), _range(other)
    if end <= other_first or other_end <= first:
        return False
    if one.element_size() != other.element_size():
        return True
    # The ranges of two columns of a matrix intersect, their elements do not.
    size, start = one.element_size(), min(first, other_first)
    mark = torch.zeros((max(end, other_end) - start) // size, dtype=torch.bool, device="cpu")
    if type(mark) is not torch.Tensor:  # a fake one
        return True
    with torch.no_grad():
        mark.as_strided(one.shape, one.stride(), (first - start) // size).fill_(True)
        return bool(mark.as_strided(other.shape, other.stride(), (other_first - start) // size).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of a storage that a tensor spans, in bytes."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = int(tensor.storage_offset()), tensor.element_size()
    return first * size, (first + int(last) + 1) * size
