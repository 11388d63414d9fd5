"""Higher-order ops, such as ``cond`` and ``flex_attention``, at the Autocast keys of devices that torch left out.

torch lets them fall through the keys of the CPU, CUDA and XPU. At other Autocast keys they raise NotImplementedError.
"""

from collections.abc import Callable
from typing import Any

import torch

from .dispatcher import clear_dispatch_cache, disable_autocast, dispatch_key, python_kernels
from .private_names import keys_that_higher_order_ops_skip, named_higher_order_ops


class HigherOrderOps:
    """Makes the higher-order ops work at a device's Autocast key, until :meth:`remove`.

    Ops without a kernel there fall through, even if they are defined later. The exception is ``flex_attention``, which
    casts its query, key and value to the fast dtype, as torch's kernel for CUDA does.
    """

    def __init__(self, key: str, device_type: str) -> None:
        self._key = dispatch_key(key)
        self._is_added = self._key is not None and self._key not in keys_that_higher_order_ops_skip
        if not self._is_added:
            return
        keys_that_higher_order_ops_skip.append(self._key)
        self._fell_through = {
            op for op in named_higher_order_ops.values() if not op.non_fallthrough_keys.has(self._key)
        }
        for op in self._without_kernel():
            op.fallthrough(self._key)
            clear_dispatch_cache(op)
        self._attention = named_higher_order_ops.get("flex_attention")
        if self._attention is not None and self._key not in python_kernels(self._attention):
            self._attention.py_impl(self._key)(_casting(self._attention, device_type))
        else:
            self._attention = None

    def remove(self) -> None:
        """Leave the ops as they were before."""
        if not self._is_added:
            return
        self._is_added = False
        keys_that_higher_order_ops_skip.remove(self._key)
        if self._attention is not None:
            del python_kernels(self._attention)[self._key]
        for op in self._without_kernel():
            if op not in self._fell_through:
                op.non_fallthrough_keys = op.non_fallthrough_keys.add(self._key)
            clear_dispatch_cache(op)

    def _without_kernel(self) -> list[Any]:
        return [op for op in named_higher_order_ops.values() if self._key not in python_kernels(op)]


def _casting(attention: Any, device_type: str) -> Callable[..., Any]:
    def cast_and_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        given = [each.to(dtype) if each.dtype is not torch.float64 else each for each in (query, key, value)]
        with disable_autocast():
            return attention(*given, *args, **kwargs)

    return cast_and_attend
