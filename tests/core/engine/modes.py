"""A dispatch mode that does something at each call of an op."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CAST = torch.ops.aten._to_copy.default


class AtOp(TorchDispatchMode):
    """Calls a function before an op, and returns what another makes of the op's result."""

    def __init__(self, op, before=lambda: None, replace=lambda result: result):
        super().__init__()
        self.op, self.before, self.replace, self.calls = op, before, replace, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is not self.op:
            return op(*args, **kwargs or {})
        self.calls += 1
        self.before()
        return self.replace(op(*args, **kwargs or {}))
