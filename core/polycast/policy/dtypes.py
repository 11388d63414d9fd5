"""The names of dtypes, as people write them."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
