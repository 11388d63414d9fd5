"""The short names of dtypes."""

import torch

FLOAT32 = "float32"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
