"""Training in regions with the recipe "fastest": gradients, what is saved, and everything that runs a backward."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import WeightCache, autocast
from polycast_plugins.fastest.choose_way import Way

from .products import ATTENTIONS, HEADS, PRODUCTS, attention, attentions, equal, made

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.usefixtures("engine"),
]
FAST, FLOAT32 = Way.FAST, Way.FLOAT32
WAYS = [(FLOAT32, FLOAT32, FLOAT32), (FLOAT32, FAST, FAST), (FAST, FLOAT32, FLOAT32), (FLOAT32, FAST, FLOAT32)]


@pytest.fixture(params=WAYS, ids=lambda ways: "-".join(way.name for way in ways))
def recipe(request, float32_way, choose_ways):
    """Return a recipe that computes forward and gradients in given ways."""
    choose_ways(request.param)
    return float32_way


def attention_of_matmuls(x, w):
    return torch.matmul(torch.matmul(x, x.mT), w.expand(len(x), *w.shape)[:, : x.shape[1]])


def attention_of_linears(x, w, mask=None, **options):
    """Return an attention of operands in the fast dtype, with heads of 8 features."""
    query, key, value = (F.linear(x, w * scale).unflatten(-1, (4, 8)).transpose(1, 2) for scale in (1, 0.5, 0.7))
    return F.scaled_dot_product_attention(query, key, value, mask, **options)


OPS = {
    **PRODUCTS,
    "linear of a vector": (F.linear, (16,), (8, 16)),
    "conv2d unbatched": (lambda x, w: F.conv2d(x, w, padding="same"), (8, 11, 9), (16, 8, 3, 3)),
    "conv2d padded unevenly": (lambda x, w: F.conv2d(x, w, padding="same"), (3, 8, 9, 9), (4, 8, 4, 2)),
    "attention of matmuls": (attention_of_matmuls, (6, 9, 32), (32, 32)),
    "attention with a mask that needs gradients": (lambda x, w: attention(x, w, w[0, 0, :, :12] * 0.1), *HEADS),
}
FUSED = ATTENTIONS | attentions("attention of linears", attention_of_linears, ((6, 12, 32), (32, 32)))
"""Attentions that torch computes by its fused kernel, which has no second derivative."""


def gradients(function, x, weight, region=None):
    """Return the result of a function, and the gradients of its arguments, in float64."""
    x.grad = weight.grad = None
    with region or nullcontext():
        result = function(x, weight)
    torch.manual_seed(1)
    result.backward(torch.randn(result.shape, dtype=torch.float64).to(result.dtype))
    return result, x.grad, weight.grad


def errors(found, expected):
    return [
        float((one.detach().double() - other.detach()).norm() / other.detach().norm())
        for one, other in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS | FUSED)
def test_gradients_are_as_exact_as_torchs(op, recipe, dtype):
    function, *shapes = (OPS | FUSED)[op]
    x, weight = made(shapes, dtype)
    exact = gradients(function, x.detach().double().requires_grad_(), nn.Parameter(weight.detach().double()))
    torchs = errors(gradients(function, x, weight, torch.autocast("cpu")), exact)
    ours = gradients(function, x, weight, autocast("cpu", recipe=recipe))
    assert [each.dtype for each in ours] == [torch.bfloat16, dtype, torch.float32]
    for error, of_torch in zip(errors(ours, exact), torchs, strict=True):
        assert error <= 1.1 * of_torch + 1e-4


def test_nothing_is_saved_for_gradients_that_are_not_needed(float32_way):
    layer, saved = nn.Linear(32, 16), []
    layer.weight.requires_grad_(False)

    def pack(tensor):
        saved.append(tensor.dtype)
        return tensor

    with autocast("cpu", recipe=float32_way), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(8, 32, requires_grad=True))
    assert saved == [torch.bfloat16]


@pytest.mark.parametrize("op", OPS)
def test_the_gradient_of_a_gradient(op, recipe):
    function, *shapes = OPS[op]
    x, weight = made(shapes)

    def penalty(x, weight, region):
        with region:
            result = function(x, weight)
        loss = result.to(torch.promote_types(result.dtype, torch.float32)).pow(2).mean()  # not linear in the result
        of_x, of_weight = torch.autograd.grad(loss, (x, weight), create_graph=True)
        return torch.autograd.grad(of_x.pow(2).sum() + of_weight.pow(2).sum(), (x, weight))

    off = torch.autocast("cpu", enabled=False)
    exact = penalty(x.detach().double().requires_grad_(), nn.Parameter(weight.detach().double()), off)
    torchs = errors(penalty(x, weight, torch.autocast("cpu")), exact)
    ours = errors(penalty(x, weight, autocast("cpu", recipe=recipe)), exact)
    for error, of_torch in zip(ours, torchs, strict=True):
        assert error <= 1.25 * of_torch + 1e-3


def step(model, x, region, call=lambda model, x: model(x)):
    """Return the gradients of a model's weights after a backward."""
    model.zero_grad()
    with region:
        loss = call(model, x).float().pow(2).mean()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


class SelfAttention(nn.Module):
    """Attention of rows to each other, with heads of 8 features."""

    def forward(self, x):
        heads = x.view(1, len(x), 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), SelfAttention(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_in_the_same_ways(model, recipe, reentrant):
    x = torch.randn(8, 16, requires_grad=True)
    expected = step(model, x, autocast("cpu", recipe=recipe))
    found = step(
        model, x, autocast("cpu", recipe=recipe), lambda model, x: checkpoint(model, x, use_reentrant=reentrant)
    )
    assert equal(found, expected)


def test_a_backward_can_run_twice_and_in_the_region(model, recipe):
    x = torch.randn(8, 16)
    expected = step(model, x, autocast("cpu", recipe=recipe))
    model.zero_grad()
    with autocast("cpu", recipe=recipe):
        loss = model(x).float().pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert equal([parameter.grad for parameter in model.parameters()], [2 * each for each in expected])


def test_tied_weights_add_up_their_gradients_in_float32(recipe):
    weight, x = nn.Parameter(torch.randn(16, 16)), torch.randn(4, 16)
    with autocast("cpu", recipe=recipe):
        F.linear(F.linear(x, weight), weight.t()).sum().backward()
    both = weight.grad.clone()
    exact = nn.Parameter(weight.detach().double())
    F.linear(F.linear(x.double(), exact), exact.t()).sum().backward()
    assert both.dtype is torch.float32
    assert float((both - exact.grad).norm() / exact.grad.norm()) < 0.02


@pytest.mark.parametrize("cached", [True, False])
def test_a_step_of_the_optimizer_is_seen(model, recipe, cached):
    x, optimizer = torch.randn(8, 16), torch.optim.SGD(model.parameters(), lr=0.1)
    region = autocast("cpu", recipe=recipe, cache=WeightCache() if cached else None)
    for _ in range(3):
        expected = step(copy.deepcopy(model), x, autocast("cpu", recipe=recipe))
        assert equal(step(model, x, region), expected)
        optimizer.step()


def test_batched_gradients(recipe):
    layer, x = nn.Linear(8, 4), torch.randn(3, 8, requires_grad=True)
    with autocast("cpu", recipe=recipe):
        result = layer(x)
    vectors = torch.randn(5, *result.shape).bfloat16()
    (found,) = torch.autograd.grad(result, x, vectors, is_grads_batched=True, retain_graph=True)
    for vector, of_vector in zip(vectors, found, strict=True):
        (expected,) = torch.autograd.grad(result, x, vector, retain_graph=True)
        torch.testing.assert_close(of_vector, expected, rtol=1e-2, atol=1e-2)


def test_transforms_and_forward_mode_use_the_fast_dtype(float32_way, recipe_counts):
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    with autocast("cpu"):
        expected = torch.func.vmap(torch.func.grad(lambda x: layer(x).sum()))(x)
    with autocast("cpu", recipe=float32_way), recipe_counts() as counts:
        assert torch.equal(torch.func.vmap(torch.func.grad(lambda x: layer(x).sum()))(x), expected)
        _, tangent = torch.func.jvp(layer, (x,), (x,))
    assert tangent.dtype is torch.bfloat16
    assert "something records, transforms or watches the ops" in {record.declined for record in counts.records()}


def test_what_has_no_gradients_here_runs_in_the_fast_dtype(float32_way, recipe_counts):
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    with autocast("cpu", recipe=float32_way), recipe_counts() as counts:
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    (record,) = counts.records()
    assert record.declined == "autograd records it, and its gradients are computed in the fast dtype only"


def test_explain_shows_the_ways_of_forward_and_backward(float32_way):
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    with autocast("cpu", recipe=float32_way):
        explained = polycast.explain("linear", x, layer.weight, layer.bias, device_type="cpu")
    assert explained.way == "float32"
    assert explained.reason.startswith("forward in float32, backward in float32: 0.")
