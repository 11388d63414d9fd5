"""A policy and batches for training runs."""

import pytest
import torch

import polycast


def dtypes_in_a_region(layers, region=None):
    """Return the dtypes that the modules of a model return in a region."""
    found = []
    handles = [layer.register_forward_hook(lambda _, inputs, output: found.append(output.dtype)) for layer in layers]
    with region or polycast.autocast("cpu"):
        layers(torch.ones(1, 8))
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def policy():
    """Return a policy with a rule for a module, and a policy for an op."""
    return polycast.Policy({"relu": "fp32"}, modules={"**.2": "fp32"}, name="careful")


@pytest.fixture
def layers():
    """Return a model whose third layer the policy keeps in float32."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


@pytest.fixture
def data():
    x = torch.randn(32, 8)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


@pytest.fixture
def dtypes():
    """Return a function that records the dtypes which the modules of a model return."""

    def record(layers):
        found = [None] * len(layers)

        def note(position):
            return lambda module, inputs, output: found.__setitem__(position, output.dtype)

        for position, layer in enumerate(layers):
            layer.register_forward_hook(note(position))
        return found

    return record
