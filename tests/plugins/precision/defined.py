"""A module that is defined in a line or two."""

from torch import nn


class Defined(nn.Module):
    """Calls a function with itself and its arguments; the modules and parameters in it are given by name."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)
