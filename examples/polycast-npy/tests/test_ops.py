"""Each op gives what it gives on the CPU, and so does its backward."""

import inspect

import pytest
import torch
from torch.nn import functional as F

from polycast_npy.ops import _ON_ARRAYS
from polycast_npy.ops.adapter import find

X, Y = (3, 4), (3, 4)  # the shapes of the float32 inputs of a case

# name: (function of tensors, shapes of its float32 inputs); functions take the device of their inputs
CASES = {
    "add": (lambda x, y: x + y, X, Y),
    "add a row": (lambda x, y: x + y, X, (4,)),
    "add with alpha": (lambda x, y: torch.add(x, y, alpha=3), X, Y),
    "subtract": (lambda x, y: x - y, X, Y),
    "subtract from a number": (lambda x: 2 - x, X),
    "multiply": (lambda x, y: x * y, X, Y),
    "multiply by a number": (lambda x: x * 3, X),
    "divide": (lambda x, y: x / (y.abs() + 1), X, Y),
    "floor divide": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), X),
    "truncated divide": (lambda x: torch.div(x, 0.3, rounding_mode="trunc"), X),
    "remainder": (lambda x: x % 0.3, X),
    "power": (lambda x: x**3, X),
    "power of a tensor": (lambda x, y: x.abs() ** y, X, Y),
    "power of a number": (lambda x: 2**x, X),
    "negative": (lambda x: -x, X),
    "exp": (lambda x: x.exp(), X),
    "expm1": (lambda x: x.expm1(), X),
    "log": (lambda x: (x.abs() + 1).log(), X),
    "log1p": (lambda x: x.abs().log1p(), X),
    "sqrt": (lambda x: (x.abs() + 1).sqrt(), X),
    "rsqrt": (lambda x: (x.abs() + 1).rsqrt(), X),
    "reciprocal": (lambda x: (x.abs() + 1).reciprocal(), X),
    "sin": (lambda x: x.sin(), X),
    "cos": (lambda x: x.cos(), X),
    "tan": (lambda x: x.clamp(-1, 1).tan(), X),
    "asin": (lambda x: (x.sin() / 2).asin(), X),
    "acos": (lambda x: (x.sin() / 2).acos(), X),
    "sinh": (lambda x: x.sinh(), X),
    "cosh": (lambda x: x.cosh(), X),
    "tanh": (lambda x: x.tanh(), X),
    "sigmoid": (lambda x: x.sigmoid(), X),
    "atan2": (torch.atan2, X, Y),
    "maximum": (torch.maximum, X, Y),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), X),
    "clamp from below": (lambda x: x.clamp(min=-0.5), X),
    "clamp from above": (lambda x: x.clamp(max=0.5), X),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=2), X, Y),
    "addcdiv": (lambda x, y: torch.addcdiv(x, x, y.abs() + 1, value=2), X, Y),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.25), X, Y),
    "where": (lambda x, y: torch.where(x > 0, x, y), X, Y),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 7.0), X),
    "relu": (lambda x: x.relu(), X),
    "leaky by hand": (lambda x: torch.where(x > 0, x, x * 0.1), X),
    "gelu": (lambda x: F.gelu(x), X),
    "gelu with tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "silu by hand": (lambda x: x * x.sigmoid(), X),
    "in place": (lambda x, y: x.clone().add_(y).mul_(2).clamp_(-1, 1), X, Y),
    "sum": (lambda x: x.sum(), X),
    "sum of rows": (lambda x: x.sum(1), X),
    "sum kept": (lambda x: x.sum((0, 1), keepdim=True), X),
    "mean": (lambda x: x.mean(), X),
    "mean of columns": (lambda x: x.mean(0), X),
    "prod": (lambda x: x.prod(), X),
    "prod of rows": (lambda x: x.prod(1), X),
    "var": (lambda x: x.var(), X),
    "std of rows": (lambda x: x.std(1, correction=0), X),
    "norm": (lambda x: torch.linalg.vector_norm(x), X),
    "norm of rows": (lambda x: torch.linalg.vector_norm(x, 3, dim=1), X),
    "greatest size": (lambda x: torch.linalg.vector_norm(x, float("inf")), X),
    "cumsum": (lambda x: x.cumsum(1), X),
    "max": (lambda x: x.max(), X),
    "min of rows": (lambda x: x.min(1).values, X),
    "amax": (lambda x: x.amax(0), X),
    "mm": (lambda x, y: x @ y, (3, 4), (4, 5)),
    "mm transposed": (lambda x, y: x @ y.t(), (3, 4), (5, 4)),
    "mv": (lambda x, y: x @ y, (3, 4), (4,)),
    "dot": (lambda x, y: x @ y, (4,), (4,)),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=3), (5,), (3, 4), (4, 5)),
    "addmv": (lambda b, x, y: torch.addmv(b, x, y), (3,), (3, 4), (4,)),
    "bmm": (lambda x, y: x @ y, (2, 3, 4), (2, 4, 5)),
    "baddbmm": (lambda b, x, y: torch.baddbmm(b, x, y, alpha=2), (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    "linear": (F.linear, (3, 4), (5, 4), (5,)),
    "attention": (F.scaled_dot_product_attention, (2, 3, 4), (2, 3, 4), (2, 3, 4)),
    "softmax": (lambda x: x.softmax(1), X),
    "log_softmax": (lambda x: x.log_softmax(0), X),
    "logsumexp": (lambda x: x.logsumexp(1), X),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (2, 3, 4), (4,), (4,)),
    "layer_norm without weight": (lambda x: F.layer_norm(x, (3, 4)), (2, 3, 4)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 3, 3), (4,), (4,)),
    "group_norm without weight": (lambda x: F.group_norm(x, 2), (2, 4, 3)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (3, 4, 2, 2), (4,), (4,)),
    "batch_norm without weight": (lambda x: F.batch_norm(x, None, None, training=True), (5, 4)),
    "batch_norm in eval mode": (
        lambda x, w, b: F.batch_norm(x, torch.arange(4.0).to(x.device), torch.ones(4).to(x.device), w, b),
        (3, 4, 2),
        (4,),
        (4,),
    ),
    "mse_loss": (F.mse_loss, X, Y),
    "mse_loss unreduced": (lambda x, y: F.mse_loss(x, y, reduction="none"), X, Y),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 3, 1]).to(x.device)), X),
    "cross_entropy summed": (lambda x: F.cross_entropy(x, torch.tensor([0, 3, 1]).to(x.device), reduction="sum"), X),
    "cross_entropy unreduced": (
        lambda x: F.cross_entropy(x, torch.tensor([0, 3, 1]).to(x.device), reduction="none"),
        X,
    ),
    "cross_entropy that ignores": (lambda x: F.cross_entropy(x, torch.tensor([0, -100, 1]).to(x.device)), X),
    "cross_entropy with weights": (
        lambda x: F.cross_entropy(
            x, torch.tensor([0, 3, 1]).to(x.device), weight=torch.tensor([1.0, 2, 3, 4]).to(x.device)
        ),
        X,
    ),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 6, 5), (4, 3, 3, 3), (4,)),
    "conv2d with steps": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=(1, 2), dilation=(1, 2)),
        (2, 3, 8, 9),
        (4, 3, 3, 2),
    ),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=2), (2, 4, 5, 5), (6, 2, 2, 2)),
    "conv2d of one image": (lambda x, w: F.conv2d(x, w), (3, 5, 5), (4, 3, 2, 2)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), (2, 3, 7), (4, 3, 3)),
    "conv3d": (lambda x, w: F.conv3d(x, w, stride=2), (1, 2, 4, 5, 4), (3, 2, 2, 2, 2)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (2, 3, 6, 4)),
    "max_pool2d with steps": (lambda x: F.max_pool2d(x, 3, 2, padding=1, dilation=(1, 2)), (2, 3, 7, 8)),
    "max_pool2d with ceil_mode": (lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True), (3, 5, 7)),
    "reshape": (lambda x: x.reshape(2, 6) * 2, X),
    "transpose": (lambda x: x.t() * torch.arange(3.0).to(x.device), X),
    "permute": (lambda x: x.permute(2, 0, 1).contiguous(), (2, 3, 4)),
    "expand": (lambda x: x.expand(5, 3, 4).sum(0), X),
    "slice": (lambda x: x[1:, ::2] * 2, X),
    "select": (lambda x: x[1] * x[:, 0].sum(), X),
    "flatten": (lambda x: x.flatten(1), (2, 3, 4)),
    "diagonal": (lambda x: x.diagonal() * 2, X),
    "flip": (lambda x: x.flip(0, 1), X),
    "scatter": (lambda x, y: x.scatter(1, torch.tensor([[0], [3], [1]]).to(x.device), y), X, (3, 1)),
    "cat": (lambda x, y: torch.cat([x, y], 1), X, (3, 2)),
    "stack": (lambda x, y: torch.stack([x, y]), X, Y),
    "split": (lambda x: x.split(2, 1)[1] * 2, X),
    "index": (lambda x: x[torch.tensor([2, 0, 2]).to(x.device)], X),
    "index two": (lambda x: x[torch.tensor([2, 0]).to(x.device), torch.tensor([1, 3]).to(x.device)], X),
    "index with a mask": (lambda x: x[x > 0], X),
    "index_select": (lambda x: x.index_select(1, torch.tensor([3, 0, 3]).to(x.device)), X),
    "gather": (lambda x: x.gather(1, torch.tensor([[0], [3], [1]]).to(x.device)), X),
    "triu": (lambda x: x.triu(1), X),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 0], [2, 1]]).to(w.device), w, padding_idx=0), X),
}


@pytest.mark.parametrize("name", CASES)
def test_an_op_and_its_gradients_are_those_of_the_cpu(name):
    function, *shapes = CASES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    moved = [x.detach().to("npy").requires_grad_() for x in inputs]
    expected, actual = function(*inputs), function(*moved)
    assert actual.device.type == "npy"
    torch.testing.assert_close(actual.cpu(), expected)
    weights = torch.randn(expected.shape)
    (expected * weights).sum().backward()
    (actual * weights.to("npy")).sum().backward()
    for x, y in zip(inputs, moved, strict=True):
        torch.testing.assert_close(y.grad.cpu(), x.grad)


# What has no gradient, or takes no float32.
PLAIN = {
    "compare": lambda d: torch.tensor([1.0, 2, 3], device="cpu").to(d) >= torch.tensor([3.0, 2, 1]).to(d),
    "compare with a number": lambda d: torch.arange(4).to(d) == 2,
    "logic": lambda d: (torch.arange(4).to(d) > 1) & (torch.arange(4).to(d) < 3) | ~(torch.arange(4).to(d) > 0),
    "any": lambda d: (torch.arange(4).to(d) > 2).any(),
    "all": lambda d: (torch.arange(6).to(d).reshape(2, 3) > 1).all(1),
    "argmax": lambda d: torch.tensor([[1.0, 5, 2], [7, 0, 7]]).to(d).argmax(1),
    "argmin of all": lambda d: torch.tensor([[1.0, 5, 2], [7, 0, 7]]).to(d).argmin(),
    "max with indices": lambda d: torch.tensor([[1.0, 5, 2], [7, 0, 7]]).to(d).max(0, keepdim=True).indices,
    "nonzero": lambda d: torch.tensor([[0, 5], [7, 0]]).to(d).nonzero().contiguous(),
    "integer sum": lambda d: torch.arange(5, dtype=torch.int32).to(d).sum(),
    "integer reciprocal": lambda d: torch.arange(1, 5).to(d).reciprocal(),
    "integer sigmoid": lambda d: torch.tensor([0, 255], dtype=torch.uint8).to(d).sigmoid(),
    "integer division": lambda d: torch.arange(5).to(d) / 2,
    "integer floor division": lambda d: torch.arange(-3, 3).to(d) // 2,
    "masked_select": lambda d: torch.arange(4).to(d).masked_select(torch.tensor([True, False, True, False]).to(d)),
    "isnan": lambda d: torch.tensor([1.0, float("nan")]).to(d).isnan(),
    "isfinite": lambda d: torch.tensor([1.0, float("inf")]).to(d).isfinite(),
    "arange": lambda d: torch.arange(2, 9, 3, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, 3, dtype=torch.int64, device=d),
    "full": lambda d: torch.full((2, 3), 1.5, dtype=torch.float16, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "tensor": lambda d: torch.tensor([[1.0, 2], [3, 4]], device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(3).to(d)),
    "randn": lambda d: torch.randn(2, 3, device=d),
    "rand": lambda d: torch.rand(2, 3, device=d),
    "randint": lambda d: torch.randint(0, 9, (5,), device=d),
    "bernoulli": lambda d: torch.empty(9, device=d).bernoulli_(0.5),
    "randperm": lambda d: torch.randperm(9, device=d),
    "put": lambda d: torch.zeros(4).to(d).index_put_((torch.tensor([1, 3]).to(d),), torch.tensor([5.0, 6]).to(d)),
    "assign to a slice": lambda d: _assigned(torch.zeros(3, 4).to(d)),
    "assign where a mask holds": lambda d: _masked(torch.arange(5.0).to(d)),
    "resize": lambda d: torch.ones(2, device=d).resize_(3, 4).zero_(),
    "memory of channels last": lambda d: torch.zeros(1, 2, 3, 4, device=d).to(memory_format=torch.channels_last),
}


def _assigned(x):
    x[1:, ::2] = torch.ones(2, 2).to(x.device)
    x[0, 1] = 7
    return x


def _masked(x):
    x[x > 2] = 0
    return x


@pytest.mark.parametrize("name", PLAIN)
def test_an_op_without_gradient_is_that_of_the_cpu(name):
    results = []
    for device in ("cpu", "npy"):
        torch.manual_seed(0)
        results.append(PLAIN[name](device))
    expected, actual = results
    assert actual.device.type == "npy"
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


def test_functions_of_arrays_take_the_arguments_of_their_op_by_name():
    refused = []
    for name, function in [item for module in _ON_ARRAYS for item in module.KERNELS.items()]:
        arguments = find(name)._schema.arguments
        outputs = [a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]
        try:
            inspect.signature(function).bind(**{a.name: None for a in arguments if a.name not in outputs})
        except TypeError as error:
            refused.append((name, str(error)))
    assert refused == []


@pytest.mark.parametrize("op", [torch.mm, torch.add, torch.mul, lambda x, y: x.sum(0), lambda x, y: x.softmax(1)])
def test_float16_results_are_those_of_float32_rounded_once(op):
    x, y = torch.randn(8, 8).half(), torch.randn(8, 8).half()
    actual = op(x.to("npy"), y.to("npy")).cpu()
    assert actual.dtype is torch.float16
    torch.testing.assert_close(actual, op(x.float(), y.float()).half(), rtol=1e-3, atol=1e-3)


def test_a_long_sum_of_float16_does_not_stall():
    ones = torch.ones(1, 4096, dtype=torch.float16, device="npy")  # 2048 + 1 is 2048 in float16
    assert (ones @ ones.t()).item() == ones.sum().item() == 4096


@pytest.mark.parametrize("bad", [-1, 4])
@pytest.mark.parametrize(
    "op",
    [
        lambda x, at: F.cross_entropy(x, at),
        lambda x, at: x.index_select(1, at),
        lambda x, at: x.gather(1, at[None]),
        lambda x, at: x.scatter(1, at[None], 1.0),
        lambda x, at: x.index_add(1, at, x[:, :1]),
    ],
)
def test_an_index_outside_is_refused(op, bad):
    with pytest.raises(IndexError, match=f"^index {bad} is out of bounds for a dimension of size 4$"):
        op(torch.ones(1, 4, device="npy"), torch.tensor([bad], device="npy"))


def test_transposed_convolution_says_that_it_is_missing():
    with pytest.raises(NotImplementedError, match="npy has no transposed convolution: compute it on the CPU"):
        F.conv_transpose2d(torch.ones(1, 1, 3, 3, device="npy"), torch.ones(1, 1, 2, 2, device="npy"))
