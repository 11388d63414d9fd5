"""``compare(loss=...)`` tells the gradients of a module's call from those of others, or says that they are unknown."""

import pytest
import torch
from tests.plugins.models import Does
from torch import nn

import polycast

POLICY = dict.fromkeys(("linear", "mm", "addmm", "bmm", "matmul", "scaled_dot_product_attention"), "fp32")


def cubes(output):
    return output.float().pow(3).sum()


def compare(model, x, loss=cubes, **settings):
    return polycast.compare(model, x, loss=loss, **{"policy": POLICY, **settings})


def own_errors(comparison):
    """Return the own errors of gradients by name; None where they are unknown."""
    return {each.name: None if each.own is None else each.own.relative for each in comparison.gradients}


def linear():
    return nn.Linear(8, 8)


def residual(inner, layer, x):
    h = layer(x)
    return h + inner(h) * h


def with_cache(first, attend, x):
    h, cache = first(x), {"keys": []}
    for _ in range(2):
        h = h + attend(h, cache)
    return h + cache["keys"][0]


def write_cache(layer, h, cache):
    cache["keys"].append(layer(h))
    return sum(cache["keys"])


def with_bias(first, inner, x):
    bias = first(x)
    h = x
    for _ in range(2):
        h, bias = inner(h, bias)
    return h + bias


def pass_bias(inner, h, bias):
    return inner(h, bias)


def use_and_return(layer, h, bias):
    return layer(h) * bias, bias


def both(inner, x):
    one, two = inner(x)
    return one * two


def intermediate(first, second, x):
    h = first(x)
    return h, second(h)


def write_used(layer, act, x):
    h = layer(x)
    other = h * 2
    act(h)
    return other + h


MODELS = {
    "an input with other users": lambda: Does(residual, Does(lambda layer, h: layer(h), linear()), linear()),
    "a cache that is written": lambda: Does(with_cache, linear(), Does(write_cache, linear())),
    "an input that is returned": lambda: Does(with_bias, linear(), Does(pass_bias, Does(use_and_return, linear()))),
    "an output that is used inside": lambda: Does(both, Does(intermediate, linear(), linear())),
    "a written input with other users": lambda: Does(write_used, linear(), Does(lambda h: h.mul_(h.detach() * 3))),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_gradients_of_others_are_no_error(make):
    comparison = compare(make(), torch.randn(3, 8, requires_grad=True))
    assert max(own_errors(comparison).values()) < 1e-6
    assert {each.total.relative for each in comparison.gradients} == {0.0}


def test_a_language_model_with_a_key_value_cache():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(50, (1, 5))
    comparison = compare(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, lambda output: output.loss)
    assert max(own_errors(comparison).values()) < 1e-6
    assert {each.total.relative for each in comparison.gradients} == {0.0}


def test_an_own_error_is_unknown_where_hooks_change_the_gradients_of_outputs():
    model = nn.Sequential(linear(), linear(), linear())
    model[1].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))
    model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    comparison = compare(model, torch.randn(3, 8, requires_grad=True))
    unknown = {name for name, own in own_errors(comparison).items() if own is None}
    assert unknown == {"1", "1.weight", "1.bias"}
    assert {each.total.relative for each in comparison.gradients} == {0.0}
    assert {each.inherited for each in comparison.gradients if each.name in unknown} == {None}
    assert "-" in str(comparison)


def test_an_own_error_is_unknown_where_the_forward_computes_gradients():
    """As models of physics do, whose forces are gradients of an energy."""

    def forces(first, second, last, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = second(torch.tanh(first(x))).sum()
            (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return last(gradient)

    comparison = compare(Does(forces, linear(), linear(), linear()), torch.randn(3, 8))
    own = own_errors(comparison)
    assert {own[f"layers.{n}.weight"] for n in (0, 1)} == {None}
    assert own["layers.2.weight"] == 0.0
    assert {each.total.relative for each in comparison.gradients} == {0.0}


def test_calls_inside_of_functorch_transforms_are_not_compared():
    model = Does(lambda mapped, layer, x: layer(torch.func.vmap(mapped)(x)), linear(), linear())
    comparison = compare(model, torch.randn(3, 8))
    modules = {module.name: module.total for module in comparison.modules}
    assert modules["layers.0"] is None
    assert modules["layers.1"].relative == 0.0
    assert {each.total.relative for each in comparison.gradients} == {0.0}


def test_nothing_is_kept_alive():
    import gc
    import weakref

    alive = weakref.WeakSet()

    def note(x):
        y = x * 1
        alive.add(y)
        return y

    model = nn.Sequential(linear(), Does(note), nn.Sequential(Does(note), linear()))
    compare(model, torch.randn(3, 8))
    gc.collect()
    assert not alive
