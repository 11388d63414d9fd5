"""torch's own autocast class, and one whose instances stay torch's own while something else stands in for them."""

import torch

TorchAutocast = torch.amp.autocast_mode.autocast


class UnpatchedAutocast(TorchAutocast):
    """A region that is torch's, also while torch is patched: the patch turns instances of torch's own class only."""
