"""Models for the tests of checkpoints and of module rules."""

import pytest
import torch

import polycast

FP32 = {"aten::linear": polycast.CastPolicy.FP32}
modes = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def in_policy():
    return polycast.autocast("cpu", policy=FP32)


class Block(torch.nn.Module):
    """A layer that keeps the dtype of what it gives, at each time that it runs."""

    def __init__(self, layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(layers))
        self.seen = []

    def forward(self, x, layer=0):
        y = self.layers[layer](x)
        self.seen.append(y.dtype)
        return y.relu()

    def gradients(self, run, around):
        """Run, and go backward after the region is left; return the gradients of the input and of the weights."""
        self.zero_grad()
        self.seen.clear()
        x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
        with around:
            loss = run(x).float().pow(2).sum()
        loss.backward()
        return [
            x.grad,
            *(None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters()),
        ]

    def assert_same_gradients(self, checkpointed, plain, around):
        """Assert that two ways of running give the same bits, each in what `around` makes; return the dtypes seen."""
        expected = self.gradients(plain, around())
        actual = self.gradients(checkpointed, around())
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        return self.seen


@pytest.fixture(name="block")
def _block():
    return Block()


@pytest.fixture(name="blocks")
def _blocks():
    """A block of many layers; each is called by its number."""
    return Block(layers=64)


class Does(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@pytest.fixture
def under():
    """Return a function that makes a module under a rule, whose forward is a function."""

    def under(function, rule="fp32"):
        module = Does(function)
        polycast.apply_policy(module, polycast.Policy(modules={"": rule}))
        return module

    return under


@pytest.fixture
def call(under):
    """Return a function that calls a function as the forward of a module under a rule, in a region."""

    def call(function, *args, rule="fp32", **kwargs):
        with polycast.autocast("cpu"):
            return under(function, rule)(*args, **kwargs)

    return call


@pytest.fixture
def call_function():
    """Return a function that calls a function as an autograd.Function with inputs in float32, in a region."""

    def call_function(function, *args):
        forward = polycast.custom_fwd(lambda ctx, *args: function(*args), device_type="cpu", cast_inputs=torch.float32)
        made = type("Function", (torch.autograd.Function,), {"forward": staticmethod(forward)})
        with polycast.autocast("cpu"):
            return made.apply(*args)

    return call_function
