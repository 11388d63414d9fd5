"""torch's own autocast class, also while another stands in its place."""

import torch

TorchAutocast = torch.amp.autocast_mode.autocast
