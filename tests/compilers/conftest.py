"""What the tests of compiled code have in common."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def data():
    """An input and a layer for it."""
    torch.manual_seed(0)
    return torch.randn(3, 8), torch.nn.Linear(8, 8)
