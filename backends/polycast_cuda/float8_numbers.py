"""The format that weights and activations are cast to, and the range of its scales."""

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST = 2.0**-110
"""Rows that are smaller are cast as if this were in them, so that scales and their inverses stay normal numbers."""
