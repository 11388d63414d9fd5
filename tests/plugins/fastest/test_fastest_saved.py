"""What products of the recipe "fastest" save for their backward: no more than a plain region, and nothing else."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polycast import autocast
from polycast_plugins.fastest import fastest_plan
from polycast_plugins.fastest.choose_way import Way
from polycast_plugins.fastest.recorded_ways import Ways

pytestmark = pytest.mark.usefixtures("engine")
FAST, FLOAT32 = Way.FAST, Way.FLOAT32
WAYS = [None, (FLOAT32, FLOAT32, FLOAT32), (FLOAT32, FAST, FAST), (FAST, FLOAT32, FLOAT32), (FAST, FAST, FLOAT32)]
OPS = {
    "linear": (lambda x, w: F.linear(x, w), (48, 64), (40, 64)),
    "linear of few rows": (lambda x, w: F.linear(x, w), (4, 64), (40, 64)),
    "linear of batches": (lambda x, w: F.linear(x, w), (3, 16, 64), (40, 64)),
    "linears that share a weight": (lambda x, w: F.linear(F.linear(x, w), w), (4, 64), (64, 64)),
    "mm": (lambda x, w: torch.mm(x, w), (48, 64), (64, 40)),
    "addmm": (lambda x, w: torch.addmm(x[0, :1], x, w), (48, 64), (64, 40)),
    "matmul of activations": (lambda x, w: torch.matmul(x, (w * 1).mT), (3, 48, 64), (3, 40, 64)),
    "bmm": (lambda x, w: torch.bmm(x, w * 1), (3, 48, 64), (3, 64, 40)),
    "conv1d": (lambda x, w: F.conv1d(x, w), (3, 8, 40), (16, 8, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w), (3, 8, 11, 9), (16, 8, 3, 3)),
    "attention of bfloat16": (
        lambda x, w: F.scaled_dot_product_attention(x.bfloat16(), x.bfloat16() + 1, (w * 1).bfloat16()),
        *((2, 3, 24, 32), (2, 3, 24, 32)),
    ),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x, x, w * 1), (2, 3, 24, 32), (2, 3, 24, 32)),
}


def saved_bytes(function, x, weight, region):
    """Return the bytes of the memory that the products of a function save, besides that of its arguments."""
    storages, kept = {}, []

    def pack(tensor):
        kept.append(tensor)  # so that no other has its address
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with region, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(x, weight)
    result.sum().backward()
    return sum(
        size
        for address, size in storages.items()
        if address not in (x.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "ways", WAYS, ids=lambda ways: "chosen" if ways is None else "-".join(way.value for way in ways)
)
@pytest.mark.parametrize("op", OPS)
def test_no_more_is_saved_than_in_a_plain_region(op, ways, dtype, float32_way, monkeypatch):
    function, *shapes = OPS[op]
    x = torch.randn(shapes[0], dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(shapes[1]))
    plain = saved_bytes(function, x, weight, autocast("cpu"))
    if ways is not None:
        monkeypatch.setattr(fastest_plan, "choose_recorded", lambda *_: Ways(*ways, "for a test"))
    assert saved_bytes(function, x, weight, autocast("cpu", recipe=float32_way)) <= plain


def pointwise(op, x, w):
    return op((x + w).bfloat16())


OTHERS = {
    "matmul": (lambda x, w: torch.matmul(x, w), (8, 64), (64, 40)),
    "matmul of batches": (lambda x, w: torch.matmul(x, w), (3, 4, 64), (3, 64, 40)),
    "bmm by a weight": (lambda x, w: torch.bmm(x, w), (3, 4, 64), (3, 64, 40)),
    "baddbmm": (lambda x, w: torch.baddbmm(x[:, :, :1], x, w), (3, 4, 64), (3, 64, 40)),
    "conv2d padded": (lambda x, w: F.conv2d(x, w, padding="same"), (3, 8, 11, 9), (16, 8, 3, 3)),
    "conv3d": (lambda x, w: F.conv3d(x, w), (2, 4, 5, 6, 7), (6, 4, 3, 2, 1)),
    "attention with a mask": (
        lambda x, w: F.scaled_dot_product_attention(x, x, w * 1, x[0, 0, :, :24].detach()),
        *((2, 3, 24, 32), (2, 3, 24, 32)),
    ),
    "attention of bfloat16 with a mask": (
        lambda x, w: F.scaled_dot_product_attention(
            *(each.bfloat16() for each in (x, x, w + x)), x[0, 0, :, :24].detach()
        ),
        *((2, 3, 24, 32), (2, 3, 24, 32)),
    ),
    **{
        op.__name__: (functools.partial(pointwise, op), (200, 100), (100,))
        for op in (F.gelu, F.mish, F.silu, torch.sigmoid, torch.tanh)
    },
}
WRITES = {
    "the activation": lambda x, w, result: x.detach().zero_(),
    "the weight": lambda x, w, result: w.detach().mul_(2),
    "the weight's data": lambda x, w, result: w.data.mul_(2),
    "the weight to other memory": lambda x, w, result: setattr(w, "data", torch.zeros_like(w)),
    "the result": lambda x, w, result: result.detach().zero_(),
}


def gradients(function, shapes, dtype, region, write=None):
    """Return the gradients after a write, or None if the backward raises that a tensor was modified."""
    torch.manual_seed(0)
    x, weight = torch.randn(shapes[0]).to(dtype).requires_grad_(), nn.Parameter(torch.randn(shapes[1]))
    with region:
        for _ in range(2):  # the second call runs natively
            result = function(x, weight)
    gradient = torch.randn(result.shape).to(result.dtype)
    if write is not None:
        write(x, weight, result)
    try:
        return torch.autograd.grad(result, (x, weight), gradient)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None


def equal(one, other):
    return one is not None and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("op", OPS | OTHERS)
def test_what_a_plain_region_lets_a_program_write_before_the_backward_may_be_written(op, float32_way, monkeypatch):
    function, *shapes = (OPS | OTHERS)[op]
    for dtype in (torch.float32, torch.bfloat16):

        def found(region, write=None, dtype=dtype):
            return gradients(function, shapes, dtype, region, write)

        of_plain = found(autocast("cpu"))
        writes = {name: write for name, write in WRITES.items() if equal(found(autocast("cpu"), write), of_plain)}
        assert len(writes) > 1
        for ways in WAYS:
            with monkeypatch.context() as patch:
                if ways is not None:
                    patch.setattr(fastest_plan, "choose_recorded", lambda *_, ways=ways: Ways(*ways, "for a test"))
                expected = found(autocast("cpu", recipe=float32_way))
                for name, write in writes.items():
                    assert equal(found(autocast("cpu", recipe=float32_way), write), expected), (name, ways, dtype)
