"""``compare(loss=...)`` with models whose gradients have known errors, or errors that are unknown."""

import gc
import math
import weakref

import pytest
import torch
from tests.plugins.models import Defined, Does
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast

from .planted_gradients import Wrong, by_name, compare, mean_square, planted


def test_a_region_that_casts_nothing_has_the_same_gradients(engine):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))
    comparison = compare(model, torch.randn(3, 8))
    names = {each.name for each in comparison.gradients}
    assert names == {"(loss)", "1", "2", "2.0", "2.1", "3", *(name for name, _ in model.named_parameters())}
    for each in comparison.gradients:
        assert (each.own.relative, each.inherited, each.total.relative, each.adds) == (0.0, 0.0, 0.0, 0.0), each.name


def test_the_total_errors_are_those_of_the_gradients_of_a_training_step(engine):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 8)

    def gradients(**region):
        with polycast.autocast("cpu", **region):
            loss = mean_square(model(x))
        return torch.autograd.grad(loss, [*model.parameters()])

    found = by_name(compare(model, x, policy=None))
    pairs = zip(gradients(enabled=False), gradients(), strict=True)
    for (name, _), (expected, got) in zip(model.named_parameters(), pairs, strict=True):
        error = ((got - expected).norm() / expected.norm()).item()
        assert found[name].total.relative == pytest.approx(error, rel=1e-4)
        assert found[name].total.relative > 0


def test_the_own_error_is_that_of_the_gradients_given_those_of_float32():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 8)
    own = by_name(compare(model, x, policy=None))
    hidden = model[:2](x).detach().requires_grad_()
    output = model[2](hidden)
    (gradient,) = torch.autograd.grad(mean_square(output), output, retain_graph=True)
    with polycast.autocast("cpu"):
        cast = model[2](hidden)
    expected, got = (
        torch.autograd.grad(each, (hidden, model[2].weight), gradient.to(each.dtype)) for each in (output, cast)
    )
    for name, one, two in zip(("2", "2.weight"), expected, got, strict=True):
        assert own[name].own.relative == pytest.approx(((two - one).norm() / one.norm()).item(), rel=1e-4)


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["no checkpoint", "checkpoint", "reentrant"])
def test_an_error_in_a_backward_is_found_where_it_was_planted(engine, use_reentrant):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    model = Defined(forward, layers=nn.ModuleList(planted() if n == 2 else nn.Linear(8, 8) for n in range(5)))
    x = torch.randn(3, 8, requires_grad=True)
    comparison = compare(model, x)
    found = by_name(comparison)
    # The layer itself adds 10%, also to its weight; the layers before it inherit that; those after it are right.
    for name in ("layers.2", "layers.2.weight"):
        assert found[name].own.relative == pytest.approx(0.1, rel=1e-3)
    assert {each.own.relative for name, each in found.items() if not name.startswith("layers.2")} == {0.0}
    for number, total in enumerate([0.1, 0.1, 0.1, 0.0, 0.0]):
        for name in (f"layers.{number}", f"layers.{number}.weight"):
            assert found[name].total.relative == pytest.approx(total, abs=1e-4)
            assert number == 2 or found[name].inherited == pytest.approx(total, abs=1e-4)
    assert found["layers.2"].inherited == 0.0
    assert comparison.gradients[0].module == "layers.2"
    assert {module.own.relative for module in comparison.modules} == {0.0}


def test_an_error_of_the_forward_is_inherited_by_gradients():
    shifts = Defined(lambda self, x: x + 0.5 if torch.is_autocast_enabled("cpu") else x)
    model = nn.Sequential(nn.Linear(8, 8), shifts, nn.Linear(8, 8))
    comparison = compare(model, torch.randn(3, 8))
    assert comparison.modules[0].name == "1"
    found = by_name(comparison)
    assert {each.own.relative for each in comparison.gradients} == {0.0}
    assert found["2.weight"].inherited == found["2.weight"].total.relative > 0.1


def test_an_error_in_the_backward_of_the_loss_is_its_own():
    def loss(output):
        return Wrong.apply(output).square().mean()

    found = by_name(compare(nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8), loss))
    assert found["(loss)"].own.relative == found["(loss)"].total.relative == pytest.approx(0.1)
    assert (found["0.weight"].own.relative, found["0.weight"].total.relative) == (0.0, pytest.approx(0.1))


def test_a_shared_module_adds_up_its_calls():
    """The gradient of a module with several calls is the sum, and its own error is over all of them."""

    shared = Defined(
        lambda self, x: self.planted(self.between(self.planted(x).tanh())), planted=planted(), between=nn.Linear(8, 8)
    )
    comparison = compare(shared, torch.randn(3, 8, requires_grad=True))
    found = by_name(comparison)
    assert found["planted"].own.relative == pytest.approx(0.1, rel=1e-3)
    assert found["planted.weight"].own.relative == pytest.approx(0.1, rel=1e-3)
    assert 0.1 < found["planted.weight"].total.relative < 0.21
    assert found["between"].own.relative == 0.0
    assert {module.name: module.calls for module in comparison.modules}["planted"] == 2


@pytest.mark.parametrize("checkpointed", [False, True])
def test_tied_weights_have_one_gradient(checkpointed):
    """A weight that the embedding and the output use, once in its own module and once as a function's argument."""

    def forward(self, ids):
        h = self.embed(ids)
        h = checkpoint(self.layer, h, use_reentrant=False) if checkpointed else self.layer(h)
        return self.head(h) + nn.functional.linear(h, self.embed.weight)

    parts = {"embed": nn.Embedding(10, 8), "layer": nn.Linear(8, 8), "head": nn.Linear(8, 10, bias=False)}
    model, ids = Defined(forward, **parts), torch.randint(10, (2, 5))
    model.head.weight = model.embed.weight
    found = by_name(compare(model, ids))
    assert {(each.own.relative, each.inherited, each.total.relative) for each in found.values()} == {(0.0, 0.0, 0.0)}
    assert [name for name in found if name.endswith("weight")].count("embed.weight") == 1
    assert "head.weight" not in found
    own = by_name(compare(model, ids, policy=None))["embed.weight"].own.relative
    assert 0 < own < 0.02


def test_weights_of_modules_that_are_not_called_count_for_those_that_use_them():
    model = Defined(lambda self, x: self.attend(x, x, x)[0], attend=nn.MultiheadAttention(8, 2, batch_first=True))
    policy = dict.fromkeys(("linear", "bmm", "baddbmm", "matmul", "scaled_dot_product_attention"), "fp32")
    found = by_name(compare(model, torch.randn(2, 3, 8, requires_grad=True), policy=policy))
    assert found["attend.out_proj.weight"].own.relative == found["attend.out_proj.weight"].inherited == 0.0
    found = by_name(compare(model, torch.randn(2, 3, 8, requires_grad=True), policy=None))
    assert 0 < found["attend.out_proj.weight"].own.relative < 0.05


def test_a_recurrent_module_inside_of_another_counts_its_weights_once():
    outer = Defined(
        lambda self, x: self.layer(self.rnn(x)[0]), rnn=nn.GRU(8, 8, batch_first=True), layer=nn.Linear(8, 8)
    )
    found = by_name(compare(nn.Sequential(outer), torch.randn(2, 3, 8), policy={"linear": "fp32", "gru": "fp32"}))
    assert {(name, each.own.relative) for name, each in found.items()} == {(name, 0.0) for name in found}


def test_gradients_that_underflow_are_found():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    comparison = compare(model, torch.randn(3, 8), lambda y: y.float().mean() * 1e-7, policy=None, dtype=torch.float16)
    found = by_name(comparison)
    assert found["0.weight"].total.relative == 1.0
    assert found["2.weight"].own.relative > 0.5


def test_the_first_gradient_that_is_inf_or_nan_is_named(engine):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with torch.no_grad():
        model[2].weight.mul_(1e4)
    comparison = compare(model, torch.randn(3, 8), lambda y: y.float().sum() * 1e3, policy=None, dtype=torch.float16)
    found = by_name(comparison)
    assert comparison.first_nonfinite_gradient == "2"
    assert found["2"].makes_nonfinite
    assert found["2"].total.made > 0
    assert math.isinf(found["1.weight"].total.relative)
    assert "The first inf or nan in backward: 2." in str(comparison)


POLICY = dict.fromkeys(("linear", "mm", "addmm", "bmm", "matmul", "scaled_dot_product_attention"), "fp32")


def compare_in_float32(model, x, loss=lambda output: output.float().pow(3).sum()):
    return compare(model, x, loss, policy=POLICY)


def own_errors(comparison):
    """Return the own errors of gradients by name; None where they are unknown."""
    return {each.name: None if each.own is None else each.own.relative for each in comparison.gradients}


def linear():
    return nn.Linear(8, 8)


def call(inner, *args):
    return inner(*args)


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
    "an input with other users": lambda: Does(residual, Does(call, linear()), linear()),
    "a cache that is written": lambda: Does(with_cache, linear(), Does(write_cache, linear())),
    "an input that is returned": lambda: Does(with_bias, linear(), Does(call, Does(use_and_return, linear()))),
    "an output that is used inside": lambda: Does(both, Does(intermediate, linear(), linear())),
    "a written input with other users": lambda: Does(write_used, linear(), Does(lambda h: h.mul_(h.detach() * 3))),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_gradients_of_others_are_no_error(make):
    comparison = compare_in_float32(make(), torch.randn(3, 8, requires_grad=True))
    assert max(own_errors(comparison).values()) < 1e-6
    assert {each.total.relative for each in comparison.gradients} == {0.0}


def test_a_language_model_with_a_key_value_cache():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(50, (1, 5))
    comparison = compare_in_float32(
        GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, lambda output: output.loss
    )
    assert max(own_errors(comparison).values()) < 1e-6
    assert {each.total.relative for each in comparison.gradients} == {0.0}
    assert {(each.own.relative, each.total.relative) for each in comparison.modules} == {(0.0, 0.0)}
    assert len(comparison.outputs) == 6  # with the keys and values


def test_an_own_error_is_unknown_where_hooks_change_the_gradients_of_outputs():
    model = nn.Sequential(linear(), linear(), linear())
    model[1].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))
    model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    comparison = compare_in_float32(model, torch.randn(3, 8, requires_grad=True))
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

    comparison = compare_in_float32(Does(forces, linear(), linear(), linear()), torch.randn(3, 8))
    own = own_errors(comparison)
    assert {own[f"layers.{n}.weight"] for n in (0, 1)} == {None}
    assert own["layers.2.weight"] == 0.0
    assert {each.total.relative for each in comparison.gradients} == {0.0}


def test_calls_inside_of_functorch_transforms_are_not_compared():
    model = Does(lambda mapped, layer, x: layer(torch.func.vmap(mapped)(x)), linear(), linear())
    comparison = compare_in_float32(model, torch.randn(3, 8))
    modules = {module.name: module.total for module in comparison.modules}
    assert modules["layers.0"] is None
    assert modules["layers.1"].relative == 0.0
    assert {each.total.relative for each in comparison.gradients} == {0.0}


def test_nothing_is_kept_alive():
    alive = weakref.WeakSet()

    def note(x):
        y = x * 1
        alive.add(y)
        return y

    model = nn.Sequential(linear(), Does(note), nn.Sequential(Does(note), linear()))
    compare_in_float32(model, torch.randn(3, 8))
    gc.collect()
    assert not alive
