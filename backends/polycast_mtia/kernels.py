"""Kernels of MTIA that give an op another output dtype: none, for torch has no op on MTIA that they could stand on."""

from collections.abc import Callable
from typing import Any

import torch

KERNELS: dict[tuple[torch._ops.OpOverload, torch.dtype, torch.dtype], Callable[..., Any]] = {}
