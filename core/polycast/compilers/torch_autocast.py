"""torch's own autocast class, and a subclass that ``patch_torch`` leaves alone."""

import torch

TorchAutocast = torch.amp.autocast_mode.autocast


class UnpatchedAutocast(TorchAutocast):
    """A region of torch's own, even while the methods of torch's class are replaced."""

    __init__ = TorchAutocast.__init__
    __enter__ = TorchAutocast.__enter__
    __exit__ = TorchAutocast.__exit__
