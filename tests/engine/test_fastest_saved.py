"""The memory that products of the recipe "fastest" save for their backward: no more than those of a plain region."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polycast import Fastest, autocast
from polycast.engine.fastest import fastest_plan
from polycast.engine.fastest.choose_way import Way
from polycast.engine.fastest.recorded_ways import Ways

pytestmark = pytest.mark.usefixtures("engine")
FAST, FLOAT32 = Way.FAST, Way.FLOAT32
WAYS = [None, (FLOAT32, FLOAT32, FLOAT32), (FLOAT32, FAST, FAST), (FAST, FLOAT32, FLOAT32), (FAST, FAST, FLOAT32)]
OPS = {
    "linear": (lambda x, w: F.linear(x, w), (48, 64), (40, 64)),
    "linear of few rows": (lambda x, w: F.linear(x, w), (4, 64), (40, 64)),
    "linear of batches": (lambda x, w: F.linear(x, w), (3, 16, 64), (40, 64)),
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
def test_no_more_is_saved_than_in_a_plain_region(op, ways, dtype, profile_of, monkeypatch):
    function, *shapes = OPS[op]
    x = torch.randn(shapes[0], dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(shapes[1]))
    plain = saved_bytes(function, x, weight, autocast("cpu"))
    if ways is not None:
        monkeypatch.setattr(fastest_plan, "choose_recorded", lambda *_: Ways(*ways, "for a test"))
    recipe = Fastest(profile_of(overhead=1e-15, cast=1e-15, bfloat16=1e9))
    assert saved_bytes(function, x, weight, autocast("cpu", recipe=recipe)) <= plain
