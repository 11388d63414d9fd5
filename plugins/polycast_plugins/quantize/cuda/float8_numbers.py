"""The float8 format of weights and activations, and its range."""

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST = 2.0**-110
"""The least magnitude that a scale is made for, so that scales and their inverses are normal numbers."""
