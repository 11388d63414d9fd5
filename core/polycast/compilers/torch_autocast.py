"""torch's own autocast class, and a subclass that ``patch_torch`` leaves alone."""

import torch

TorchAutocast = torch.amp.autocast_mode.autocast


class UnpatchedAutocast(TorchAutocast):
    """A region of torch's own, even while torch is patched."""
