"""custom_fwd and custom_bwd, in both styles of torch.autograd.Function."""

from collections import namedtuple

import pytest
import torch
from torch.autograd import Function

import polycast

pytestmark = pytest.mark.usefixtures("engine")

seen = {}


def note(name, x):
    seen[name] = (polycast.is_autocast_enabled("cpu"), x.dtype, torch.mm(x, x).dtype)


@polycast.custom_bwd(device_type="cpu")
def backward(ctx, grad):
    note("backward", grad)
    return 2 * grad * ctx.saved_tensors[0]


def square(**methods):
    methods = {name: staticmethod(method) for name, method in methods.items()}
    return type("Square", (Function,), {**methods, "backward": staticmethod(backward)})


def with_ctx(cast_inputs=None):
    @polycast.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
    def forward(ctx, x):
        note("forward", x)
        ctx.save_for_backward(x)
        return x * x

    return square(forward=forward)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def with_setup_context(cast_inputs=None):
    @polycast.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
    def forward(x):
        note("forward", x)
        return x * x

    return square(forward=forward, setup_context=setup_context)


styles = pytest.mark.parametrize("style", [with_ctx, with_setup_context])


def apply(function, region, dtype=torch.float32):
    seen.clear()
    x = torch.ones(2, 2, dtype=dtype, requires_grad=True)
    with region:
        out = function.apply(x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 2.0, dtype=dtype))
    return out


OFF = (False, torch.float32, torch.float32)
REGIONS = {
    "bfloat16": (lambda: polycast.autocast("cpu"), (True, torch.float32, torch.bfloat16)),
    "float16": (lambda: polycast.autocast("cpu", torch.float16), (True, torch.float32, torch.float16)),
    "disabled": (lambda: polycast.autocast("cpu", enabled=False), OFF),
    "torch's": (lambda: torch.autocast("cpu", torch.float16), (True, torch.float32, torch.float16)),
    "policy": (lambda: polycast.autocast("cpu", policy={"mm": "fp32"}), (True, torch.float32, torch.float32)),
}


@styles
def test_backward_runs_in_the_autocast_state_of_forward(style, subtests):
    function = style()
    for name, (region, state) in REGIONS.items():
        with subtests.test(name):
            apply(function, region())
            assert seen == {"forward": state, "backward": state}


@styles
def test_backward_runs_in_that_state_though_called_in_another_region(style):
    x = torch.ones(2, 2, requires_grad=True)
    out = style().apply(x)
    with polycast.autocast("cpu"):
        out.sum().backward()
        assert seen["backward"][0] is False
        assert polycast.is_autocast_enabled("cpu")


@styles
def test_cast_inputs_casts_and_runs_both_with_autocast_off_in_an_enabled_region(style):
    out = apply(style(torch.float32), polycast.autocast("cpu"), torch.bfloat16)
    assert out.dtype is torch.float32
    assert seen == {"forward": OFF, "backward": OFF}
    apply(style(torch.float16), polycast.autocast("cpu", enabled=False))
    assert seen["forward"] == OFF


def test_containers_are_cast_through():
    Pair = namedtuple("Pair", "first second")
    got = []

    @polycast.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx, *args):
        got.extend(args)
        return args[0] * 1

    x, double, integer = torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    untouched = object()
    with polycast.autocast("cpu"):
        square(forward=forward).apply(x, [x, (double, "text")], {"key": x}, Pair(x, integer), iter([x]), untouched)
    first, listed, mapping, pair, iterator, same = got
    assert first.dtype is torch.float16
    assert [listed[0].dtype, listed[1]] == [torch.float16, (double, "text")]
    assert mapping["key"].dtype is torch.float16
    assert type(pair) is Pair
    assert (pair.first.dtype, pair.second.dtype) == (torch.float16, torch.int64)
    assert [item.dtype for item in iterator] == [torch.float16]
    assert same is untouched


def test_custom_bwd_without_custom_fwd_raises():
    class Half(Function):
        forward = staticmethod(lambda ctx, x: x * 1)

        @staticmethod
        @polycast.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"Half.backward is decorated.*Decorate forward with polycast.custom_fwd\."):
        Half.apply(x).sum().backward()


def test_either_half_may_be_torchs():
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    apply(square(forward=forward), polycast.autocast("cpu", torch.float16))
    assert seen["backward"] == (True, torch.float32, torch.float16)


@pytest.mark.parametrize("decorator", [polycast.custom_fwd, polycast.custom_bwd])
def test_a_device_type_that_is_not_a_string_is_refused(decorator):
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`, got: `<class 'torch.device'>`"):
        decorator(device_type=torch.device("cpu"))
