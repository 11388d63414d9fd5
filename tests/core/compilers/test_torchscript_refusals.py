"""TorchScript rejects of polycast.autocast what it rejects of torch.autocast."""

import pytest
import torch

import polycast

A, B = torch.rand(2, 2), torch.rand(2, 2)
HALF, FLOAT, DOUBLE, BFLOAT = torch.float16, torch.float32, torch.float64, torch.bfloat16


def scripted(make):
    """Return a function scripted with torch.autocast, and the same with polycast's."""
    return torch.jit.script(make(torch.autocast)), torch.jit.script(make(polycast.autocast))


def enabled_at_runtime(autocast):
    def f(a, b):
        with autocast("cpu", enabled=bool(a[0][0] > 2)):
            return torch.mm(a, b)

    return f


def one_of_two_regions(autocast):
    def f(a, b):
        on = autocast("cpu", enabled=True)
        off = autocast("cpu", enabled=False)
        with on if bool(a[0][0] > 2) else off:
            return torch.mm(a, b)

    return f


def a_named_instance_entered_again(autocast):
    def f(a, b):
        with autocast("cpu") as region:
            x = torch.mm(a, b)
            with region:
                return torch.mm(x, b)

    return f


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (enabled_at_runtime, "Autocast _enabled argument must be a constant"),
        (one_of_two_regions, "Unsupported autocast syntax"),
        (a_named_instance_entered_again, "`with autocast() as ...` is not supported"),
    ],
)
def test_a_region_that_only_a_run_would_tell_is_refused(make, message):
    for f in scripted(make):
        with pytest.raises(RuntimeError, match=message.replace("(", r"\(").replace(")", r"\)")):
            f(A, B)


def cached_casts(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16, cache=None):
            return torch.mm(a, b)

    return f


def a_policy(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16, policy=None):
            return torch.mm(a, b)

    return f


@pytest.mark.parametrize(("make", "argument"), [(cached_casts, "cache"), (a_policy, "policy")])
def test_what_torchs_autocast_does_not_take_is_refused(make, argument):
    with pytest.raises(RuntimeError, match=f"Keyword argument {argument} unknown"):
        torch.jit.script(make(polycast.autocast))


@pytest.mark.parametrize("autocast", [torch.autocast, polycast.autocast])
def test_a_decorated_function_is_refused(autocast):
    def f(a, b):
        return torch.mm(a, b)

    with pytest.raises(
        RuntimeError, match=r"TorchScript error: @autocast\(\) decorator is not supported in script mode"
    ):
        torch.jit.script(autocast("cpu")(f))


@pytest.mark.parametrize("autocast", [torch.autocast, polycast.autocast])
def test_a_decorator_of_a_method_is_not_seen(autocast):
    class Decorated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        @autocast("cpu")
        def forward(self, a):
            return self.linear(a)

    module = Decorated()
    assert (module(A).dtype, torch.jit.script(module)(A).dtype) == (BFLOAT, FLOAT)


class Own(polycast.autocast):
    pass


def test_a_subclass_is_not_taken_for_torchs():
    def f(a, b):
        with Own("cpu"):
            return torch.mm(a, b)

    assert not hasattr(Own, "_jit_override_qualname")
    with pytest.raises(RuntimeError, match="Own"):
        torch.jit.script(f)
