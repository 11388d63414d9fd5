"""What products of the recipe "fastest" save for their backward: no more than a plain region, and nothing else."""

import functools

import pytest
import torch
import torch.nn.functional as F

from polycast import autocast
from polycast_plugins.fastest.choose_way import Way

from .products import ATTENTIONS, FUSED_ATTENTIONS, PRODUCTS, equal, made

pytestmark = pytest.mark.usefixtures("engine")
FAST, FLOAT32 = Way.FAST, Way.FLOAT32
WAYS = [None, (FLOAT32, FLOAT32, FLOAT32), (FLOAT32, FAST, FAST), (FAST, FLOAT32, FLOAT32), (FAST, FAST, FLOAT32)]


def pointwise(op, x, w):
    return op((x + w).bfloat16())


OPS = {
    **PRODUCTS,
    **ATTENTIONS,
    **FUSED_ATTENTIONS,
    "linear of batches": (F.linear, (3, 48, 16), (8, 16)),
    "conv2d without a batch": (F.conv2d, (8, 11, 9), (6, 8, 3, 2)),
    "linears that share a weight": (lambda x, w: F.linear(F.linear(x, w), w), (4, 64), (64, 64)),
    **{
        op.__name__: (functools.partial(pointwise, op), (200, 100), (100,))
        for op in (F.gelu, F.mish, F.silu, torch.sigmoid, torch.tanh)
    },
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
@pytest.mark.parametrize("op", [name for name in OPS if not name.endswith("with a mask")])
def test_no_more_is_saved_than_in_a_plain_region(op, ways, dtype, float32_way, choose_ways):
    function, *shapes = OPS[op]
    x, weight = made(shapes, dtype)
    plain = saved_bytes(function, x, weight, autocast("cpu"))
    choose_ways(ways)
    assert saved_bytes(function, x, weight, autocast("cpu", recipe=float32_way)) <= plain


WRITES = {
    "the activation": lambda x, w, result: x.detach().zero_(),
    "the weight": lambda x, w, result: w.detach().mul_(2),
    "the weight's data": lambda x, w, result: w.data.mul_(2),
    "the weight to other memory": lambda x, w, result: setattr(w, "data", torch.zeros_like(w)),
    "the result": lambda x, w, result: result.detach().zero_(),
}


def gradients(function, shapes, dtype, region, write=None):
    """Return the gradients after a write, or None if the backward raises that a tensor was modified."""
    x, weight = made(shapes, dtype)
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


@pytest.mark.parametrize("op", OPS)
def test_what_a_plain_region_lets_a_program_write_before_the_backward_may_be_written(op, float32_way, choose_ways):
    function, *shapes = OPS[op]
    for dtype in (torch.float32, torch.bfloat16):

        def is_allowed(write, region, expected, dtype=dtype):
            found = gradients(function, shapes, dtype, region, write)
            return found is not None and equal(found, expected)

        plain = autocast("cpu")
        of_plain = gradients(function, shapes, dtype, plain)
        writes = {name: write for name, write in WRITES.items() if is_allowed(write, plain, of_plain)}
        assert len(writes) > 1
        for ways in WAYS:
            choose_ways(ways)
            region = autocast("cpu", recipe=float32_way)
            expected = gradients(function, shapes, dtype, region)
            for name, write in writes.items():
                assert is_allowed(write, region, expected), (name, ways, dtype)
