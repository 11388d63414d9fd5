"""Maia kernels with another output dtype: none, since torch has no op for them on Maia."""

from collections.abc import Callable
from typing import Any

import torch

KERNELS: dict[tuple[torch._ops.OpOverload, torch.dtype, torch.dtype], Callable[..., Any]] = {}
