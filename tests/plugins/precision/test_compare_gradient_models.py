"""``compare(loss=...)`` of models that write in place, share, recompute or fail, and what it leaves behind."""

import functools
import json
import math

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast

from .planted_gradients import by_name, compare, mean_square, planted


def in_place():
    def forward(self, x):
        h = self.first(x)
        self.act(h)
        return self.last(h)

    return Defined(forward, first=nn.Linear(8, 8), act=nn.ReLU(inplace=True), last=nn.Linear(8, 8))


def outputs():
    def forward(self, x, *, pair):
        a, b = (self.layer(each) for each in pair["both"])
        with torch.no_grad():
            c = self.layer(x)
        return {"logits": self.norm(a + b), "other": (c, [b.detach()]), "count": 3}

    return Defined(forward, layer=nn.Linear(8, 8), norm=nn.BatchNorm1d(8))


def chunks():
    """Return a model whose modules get several outputs of one node, a view, and twice the same tensor."""

    def forward(self, x):
        a, b = self.layer(x).chunk(2, -1)
        return self.add(self.add(a, b), self.add(x, x))

    return Defined(forward, layer=nn.Linear(8, 16), add=Defined(lambda self, a, b: a * 2 if a is b else a + b))


def dropped(rate=0.5):
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate), Defined(lambda self, x: x), nn.Linear(8, 8))


MODELS = {
    "in place": (in_place, lambda: torch.randn(3, 8)),
    "outputs": (outputs, lambda: {"x": torch.randn(3, 8), "pair": {"both": [torch.randn(3, 8), torch.randn(3, 8)]}}),
    "chunks": (chunks, lambda: torch.randn(3, 8, requires_grad=True)),
    "dropout": (dropped, lambda: torch.randn(3, 8)),
    "spectral norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
        lambda: torch.randn(3, 8),
    ),
}


@pytest.mark.parametrize(("make", "inputs"), MODELS.values(), ids=MODELS)
def test_gradients_have_no_error_where_the_region_computes_the_same(make, inputs):
    def loss(output):
        return mean_square(output["logits"] if isinstance(output, dict) else output)

    policy = {"linear": "fp32", "mv": "fp32", "dot": "fp32", "vdot": "fp32"}
    model = make()

    def state():
        return [(name, id(each), each.tolist()) for name, each in model.state_dict(keep_vars=True).items()]

    before = state()
    comparison = compare(model, inputs(), loss, policy=policy)
    assert {(each.own.relative, each.total.relative) for each in comparison.gradients} == {(0.0, 0.0)}
    assert {name for name, _ in model.named_parameters()} <= set(by_name(comparison))
    assert state() == before
    assert {parameter.grad for parameter in model.parameters()} == {None}
    assert not any(each._backward_hooks or each._forward_hooks for each in model.modules())


def test_parameters_without_gradients_are_left_out():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    found = by_name(compare(model, torch.randn(3, 8)))
    assert set(found) == {"(loss)", "0.weight", "0.bias", "1", "2", "2.weight", "2.bias"}
    assert [parameter.requires_grad for parameter in model[1].parameters()] == [False, False]
    assert [parameter.requires_grad for parameter in model[0].parameters()] == [True, True]


def test_a_loss_with_parameters_is_compared_too():
    loss = Defined(lambda self, output: (output * self.scale).square().mean(), scale=nn.Parameter(torch.ones(())))
    found = by_name(compare(nn.Linear(8, 8), torch.randn(3, 8), loss))
    assert found["(loss).scale"].total.relative == 0.0
    assert loss.scale.grad is None


def test_batches_add_up():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    one, two = compare(model, x, policy=None), compare(model, [x, x], policy=None)
    for name, each in by_name(one).items():
        assert by_name(two)[name].total.relative == pytest.approx(each.total.relative)
        assert by_name(two)[name].own.relative == pytest.approx(each.own.relative)
    assert {module.name: module.calls for module in two.modules} == dict.fromkeys(("", "0", "1", "2", "(loss)"), 2)
    assert two.outputs["output"].relative == pytest.approx(one.outputs["output"].relative)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_nested_checkpoints(use_reentrant):
    def inner():
        return Defined(
            lambda self, x: checkpoint(self.b, self.a(x), use_reentrant=use_reentrant), a=nn.Linear(8, 8), b=planted()
        )

    def forward(self, x):
        for inner in self.inner:
            x = checkpoint(inner, x, use_reentrant=use_reentrant)
        return x

    outer = Defined(forward, inner=nn.ModuleList([inner(), inner()]))
    found = by_name(compare(outer, torch.randn(3, 8, requires_grad=True)))
    own = {name: each.own.relative for name, each in found.items() if not math.isclose(each.own.relative, 0.0)}
    assert set(own) == {f"inner.{n}.b{part}" for n in (0, 1) for part in ("", ".weight")}
    assert found["inner.0.a.weight"].total.relative == pytest.approx(0.21, rel=1e-3)


def test_inputs_of_modules_are_not_kept_in_checkpoints(alive):
    """With a checkpoint around each layer, only the activations of one layer are alive besides those in between."""
    tensors, counts = alive

    def noted(self, x):
        output = x * 1.0
        tensors.add(output)
        return output

    def layer():
        parts = nn.Sequential(*(nn.Sequential(Defined(noted), nn.Tanh()) for _ in range(10)), nn.Linear(8, 8))
        return Defined(lambda self, x: checkpoint(self.parts, x, use_reentrant=False), parts=parts)

    compare(nn.Sequential(*(layer() for _ in range(6))), torch.randn(2, 8))
    assert 0 < max(counts) < 45  # of 120 in both runs


@pytest.mark.parametrize("function", [polycast.compare, functools.partial(polycast.tune, tolerance=1.0)])
def test_the_caller_keeps_its_gradients_and_hooks(function):
    model, x, ran = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8), []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(ran.append)
    before = [parameter.grad for parameter in model.parameters()]
    function(model, x, loss=mean_square)
    assert all(parameter.grad is each for parameter, each in zip(model.parameters(), before, strict=True))
    assert {each.min().item() for each in before} == {1.0}
    assert not ran
    model(x).mean().backward()
    assert len(ran) == 4


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_a_backward_restores_the_model_and_an_interrupt_keeps_what_was_found(error):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.fails = torch.is_autocast_enabled("cpu")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.fails:
                raise error("in backward")
            return gradient

    failing = Defined(lambda self, x: Fails.apply(x))
    model = nn.Sequential(nn.Linear(8, 8), failing, nn.Linear(8, 8))
    with pytest.raises(error, match="in backward") as caught:
        compare(model, torch.randn(3, 8), policy=None)
    assert {parameter.grad for parameter in model.parameters()} == {None}
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    if error is KeyboardInterrupt:
        found = caught.value.comparison
        assert not found.is_complete
        assert {module.name: module.own.relative > 0 for module in found.modules}["0"]
        assert {each.name for each in found.gradients} == {"(loss)", "2"}
        assert "INTERRUPTED" in str(found)


def test_the_gradients_are_printed_and_written_as_json():
    comparison = compare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8), policy=None)
    said = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert {each["module"] for each in said["gradients"]} == {"(loss)", "0", "1"}
    assert "gradient in   of" in str(comparison)
    assert comparison._repr_html_().count("<table") == 3
    without = polycast.compare(nn.Linear(8, 8), torch.randn(3, 8))
    assert without.gradients == ()
    assert "gradient" not in str(without)


LOSSES = [
    (3, TypeError, "loss must be a function of the model's output, or None; got 3"),
    (lambda y: 1.0, TypeError, "loss must return a scalar tensor that requires gradients; got float"),
    (lambda y: y, ValueError, r"loss must return .*; got the shape \(3, 8\)\. Reduce it, by mean\(\) or sum\(\)\."),
    (lambda y: y.detach().sum(), ValueError, "loss must return .*; its result does not. Check that parameters"),
    (lambda y: y.to(torch.complex64).sum(), ValueError, "loss must return .*; got complex64. Return a real number"),
]


@pytest.mark.parametrize("function", [polycast.compare, functools.partial(polycast.tune, tolerance=1.0)])
def test_a_loss_without_gradients_is_refused(function, subtests):
    for loss, error, problem in LOSSES:
        with subtests.test(problem=problem), pytest.raises(error, match=f"^{problem}"):
            function(nn.Linear(8, 8), torch.randn(3, 8), loss=loss)
