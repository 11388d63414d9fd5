"""A dispatch mode that watches."""

from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Passes ops on, and keeps them in `ops`."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))
