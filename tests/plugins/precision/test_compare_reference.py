"""``compare(reference=...)``: any two runs, which differ in dtype, policy, recipe, model or compilation."""

import copy
import json
import threading

import pytest
import torch
from tests.plugins.models import Defined, by_name
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import Reference

from .planted_gradients import mean_square

RECIPE = polycast.Int8(min_size=0)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4))


@pytest.fixture
def x():
    return torch.randn(3, 8)


def output_of(model, x, dtype, **settings):
    with torch.no_grad(), polycast.autocast("cpu", dtype, **settings):
        return model(x).float()


def distance(one, two):
    return ((one - two).norm() / two.norm()).item()


def test_a_run_against_itself_has_no_error(model, x, engine):
    comparison = polycast.compare(model, x, reference=Reference())
    assert {(module.own.relative, module.total.relative) for module in comparison.modules} == {(0.0, 0.0)}
    assert comparison.reference == comparison.tested == "a region of bfloat16 on cpu"


def test_float32_is_the_default_reference(model, x):
    default = polycast.compare(model, x)
    assert default == polycast.compare(model, x, reference=Reference(enabled=False))
    assert (default.reference, default.tested) == ("float32", "a region of bfloat16 on cpu")
    assert "float32 against a region of bfloat16 on cpu: relative errors." in str(default)


def test_two_dtypes(model, x, engine):
    comparison = polycast.compare(model, x, dtype=torch.bfloat16, reference=Reference(dtype=torch.float16))

    def expected(module, x):
        return distance(output_of(module, x, torch.bfloat16), output_of(module, x, torch.float16))

    found = by_name(comparison)
    assert found[""].total.relative == pytest.approx(expected(model, x), rel=1e-3)
    assert found["2"].own.relative == 0.0  # the modules in it are in float16, as in the reference
    with torch.no_grad():
        hidden = torch.tanh(nn.functional.linear(x.half(), model[0].weight.half(), model[0].bias.half()))
    assert found["2.0"].own.relative == pytest.approx(expected(model[2][0], hidden), rel=1e-2)
    assert comparison.reference == "a region of float16 on cpu"


@pytest.mark.parametrize("loss", [None, lambda y: y.float().square().mean()], ids=["forward", "backward"])
def test_two_policies_with_rules_for_modules(model, x, loss, engine):
    old, new = polycast.Policy(modules={"2.0": "fp32"}), polycast.Policy(modules={"2.0": "fp32", "3": "fp32"})
    comparison = polycast.compare(model, x, policy=new, reference=Reference(policy=old), loss=loss)
    own = {name: module.own.relative for name, module in by_name(comparison).items() if module.own.relative}
    assert set(own) == {"3"}
    assert by_name(comparison)["3"].total.relative == own["3"]
    assert not any("forward" in vars(module) for module in model.modules())
    if loss is not None:
        gradients = {each.name: each.own.relative for each in comparison.gradients}
        assert gradients["3.weight"] > 0.0
        assert {gradients[name] for name in ("0.weight", "2.0.weight")} == {0.0}


def test_two_policies_for_ops(model, x):
    reference = Reference(policy={"linear": "fp32"})
    comparison = polycast.compare(model, x, reference=reference)
    same = polycast.compare(model, x)
    assert {name: module.total for name, module in by_name(comparison).items()} == {
        name: module.total for name, module in by_name(same).items()
    }
    comparison = polycast.compare(model, x, policy={"linear": "fp32"}, reference=Reference(policy={}))
    assert by_name(comparison)["0"].own.relative > 0
    assert by_name(comparison)["2"].own.relative == 0


@pytest.mark.usefixtures("int8_in_python")
def test_two_recipes(model, x, engine):
    comparison = polycast.compare(model, x, recipe=RECIPE, reference=Reference(recipe="none"))
    assert comparison.reference == "a region of bfloat16 on cpu"
    assert comparison.tested == "a region of bfloat16 and int8 on cpu"
    expected = distance(output_of(model, x, torch.bfloat16, recipe=RECIPE), output_of(model, x, torch.bfloat16))
    assert by_name(comparison)[""].total.relative == pytest.approx(expected, rel=1e-3)
    assert by_name(comparison)["0"].own.relative > 0
    assert by_name(comparison)["2"].own.relative == 0
    assert {each.calls for each in comparison.low_bit} == {3}  # of the tested run only
    opposite = polycast.compare(model, x, reference=Reference(recipe=RECIPE))
    assert by_name(opposite)["0"].own.relative > 0
    assert by_name(opposite)["2"].own.relative == 0
    assert opposite.low_bit == ()


@pytest.mark.parametrize("enabled", [False, True], ids=["float32", "region"])
def test_two_checkpoints(model, x, enabled, engine):
    """The error of a container excludes the modules in it, also if their weights differ."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2][0].weight.mul_(1.5)
    before = [each.tolist() for each in (*model.parameters(), *other.parameters())]
    comparison = polycast.compare(other, x, reference=model, enabled=enabled, loss=lambda y: y.float().sum())
    found = by_name(comparison)
    assert {name for name, module in found.items() if module.own.relative} == {"2.0"}
    assert found["0"].total.relative == 0.0
    assert found["3"].inherited == found["3"].total.relative > 0.0
    assert found["2"].total.relative > 0.0
    gradients = {each.name: each for each in comparison.gradients}
    assert {name for name, each in gradients.items() if each.own.relative} == {"2.0"}
    assert gradients["0.weight"].inherited > 0.0
    assert [each.tolist() for each in (*model.parameters(), *other.parameters())] == before
    assert {each.grad for each in (*model.parameters(), *other.parameters())} == {None}
    expected = "a region of bfloat16 on cpu" if enabled else "float32"
    assert (comparison.reference, comparison.tested) == (expected, expected)


def test_a_checkpoint_in_a_region_against_another_in_float32(model, x):
    other = copy.deepcopy(model)
    reference = Reference(model=model, enabled=False)
    found = by_name(polycast.compare(other, x, reference=reference))
    assert found == by_name(polycast.compare(model, x))


def test_models_with_different_modules_are_matched_where_they_agree(x):
    def new(**norm):
        def forward(self, x):
            return self.last(self.norm(self.first(x)) if norm else self.first(x))

        return Defined(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 8), **norm)

    norm = nn.LayerNorm(8)
    for one, two in ((new(norm=norm), new()), (new(), new(norm=norm))):
        two.load_state_dict(one.state_dict(), strict=False)
        found = by_name(polycast.compare(two, x, reference=one, enabled=False))
        assert (found["first"].total.relative, found["last"].own.relative) == (0.0, 0.0)
        assert found["last"].inherited > 0.0


def test_each_model_keeps_its_own_state(x):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))

    one, two = make(), make()
    comparison = polycast.compare(one, x, reference=two, enabled=False, loss=lambda y: y.sum())
    assert {(module.own.relative, module.total.relative) for module in comparison.modules} == {(0.0, 0.0)}
    assert {each.total.relative for each in comparison.gradients} == {0.0}
    assert [each[1].num_batches_tracked.item() for each in (one, two)] == [0, 0]


def counting_backend(calls):
    """Return a backend for torch.compile that runs graphs eagerly, with twice their output."""

    def backend(graph, inputs):
        def run(*args):
            calls.append(threading.current_thread().name)
            return [each * 2 if each.is_floating_point() else each for each in graph(*args)]

        return run

    return backend


@pytest.mark.parametrize("how", ["wrapped", "in place", "a part"])
def test_eager_and_compiled(model, x, how):
    calls = []
    backend, compiled, names, wrong = counting_backend(calls), model, {""}, ""
    if how == "wrapped":
        compiled = torch.compile(model, backend=backend)
    elif how == "in place":
        compiled = Defined(lambda self, x: self.model(x) + 0, model=model)
        compiled.compile(backend=backend)
    else:
        model[2] = torch.compile(model[2], backend=backend)
        names, wrong = {"", "0", "1", "2", "3"}, "2"
    reference = Reference(compiled=False)
    comparison = polycast.compare(compiled, x, compiled=True, enabled=False, reference=reference)
    found = by_name(comparison)
    assert {name: each.own.relative for name, each in found.items()} == {
        name: pytest.approx(1.0) if name == wrong else 0.0 for name in names
    }
    assert {"polycast.compare", "MainThread"} == set(calls)  # the tested run, and the repeated call
    assert (comparison.reference, comparison.tested) == ("float32", "float32, compiled")
    assert how != "a part" or found["3"].inherited > 0.0
    # The model is compiled, and not eager, afterwards.
    before = len(calls)
    with torch.no_grad():
        compiled(x)
    assert len(calls) == before + 1


def test_a_compiled_model_against_its_eager_one(model, x):
    calls = []
    compiled = torch.compile(model, backend=counting_backend(calls))
    comparison = polycast.compare(compiled, x, compiled=True, reference=Reference(model, compiled=False))
    assert [module.name for module in comparison.modules] == [""]
    assert comparison.modules[0].own.relative == pytest.approx(1.0, rel=1e-3)
    assert calls
    assert "_orig_mod.2.0" in by_name(polycast.compare(compiled, x))
    eager = polycast.compare(compiled, x, reference=model)
    assert set(by_name(eager)) == {"", "0", "1", "2", "2.0", "2.1", "3"}
    assert {module.total.relative for module in eager.modules} == {0.0}


@pytest.mark.slow
def test_gradients_of_compiled_code(model, x):
    compiled = torch.compile(model, backend="aot_eager")
    settings = {"compiled": True, "reference": Reference(compiled=False), "loss": lambda y: y.float().sum()}
    gradients = polycast.compare(compiled, x, device_type="cpu", **settings).gradients
    assert {f"_orig_mod.{name}" for name, _ in model.named_parameters()} <= {each.name for each in gradients}
    assert all(each.total.relative < 0.02 for each in gradients)


@pytest.mark.parametrize(
    ("reference", "error", "problem"),
    [
        ("float16", TypeError, "reference must be a polycast.Reference, a model, or None for float32; got 'float16'"),
        ({}, TypeError, r"got a mapping \(dict\)\. Load a state dict into a copy of the model"),
        (Reference(model=3), TypeError, "the model of a Reference must be a torch.nn.Module, got int"),
        (Reference(dtype=torch.float64), RuntimeError, r".*An enabled region is needed\."),
        (Reference(recipe="int9"), ValueError, "'int9' is not a recipe"),
        (Reference(policy={"lineer": "fp32"}), ValueError, "lineer"),
    ],
    ids=["a text", "a state dict", "a number", "float64", "recipe", "policy"],
)
def test_invalid_references_are_refused(model, x, reference, error, problem):
    with pytest.raises(error, match=problem):
        polycast.compare(model, x, reference=reference)


def test_a_reference_with_inf_is_warned_about(model, x):
    with torch.no_grad():
        model[3].weight.mul_(1e6)
    with pytest.warns(UserWarning, match="^a region of float16 on cpu's own output has"):
        comparison = polycast.compare(model, x, dtype=torch.bfloat16, reference=Reference(dtype=torch.float16))
    said = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert said["reference"] == "a region of float16 on cpu"


def net(width=8, outputs=4):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, outputs))


@pytest.mark.parametrize("other", [{"width": 12}, {"outputs": 3}])
def test_models_whose_layers_have_other_shapes_can_be_compared(engine, other):
    comparison = polycast.compare(net(), torch.randn(5, 6), reference=net(**other), enabled=False, loss=mean_square)
    errors = {each.name: each.own.relative for each in comparison.modules}
    assert errors["2"] == float("inf")
    assert errors["1"] == errors["(loss)"] == 0
    assert {each.own for each in comparison.gradients if each.name in ("2.weight", "2.bias")} == {None}


@pytest.mark.parametrize("model", ["reference", "tested"])
def test_an_exception_of_a_model_itself_is_raised(model):
    wrong = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(9, 4))
    models = (wrong, net()) if model == "reference" else (net(), wrong)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        polycast.compare(models[1], torch.randn(5, 6), reference=models[0])


@pytest.mark.parametrize("loss", [None, mean_square])
def test_a_model_in_the_fast_dtype_can_be_compared(engine, loss):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).bfloat16()
    comparison = polycast.compare(model, torch.randn(5, 6).bfloat16(), loss=loss)
    assert comparison.outputs["output"].relative < 0.02
    assert {each.own.relative for each in comparison.modules} == {0.0}


def test_a_gradient_of_rounding_errors_only_does_not_come_first():
    """The gradient of a bias before a batch norm is zero, but for rounding."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    gradients = polycast.compare(model, torch.randn(64, 16), loss=mean_square).gradients
    bias = next(each for each in gradients if each.name == "0.bias")
    assert bias.total.relative > 100
    assert bias.adds < 0.1
    assert gradients[0].name != "0.bias"


def test_a_reentrant_checkpoint_does_not_warn():
    """A part gets no gradients when only those of the module around it are computed again."""

    def forward(self, x):
        return self.last(checkpoint(self.second, self.first(x), use_reentrant=True))

    model = Defined(forward, first=nn.Linear(6, 8), second=nn.Linear(8, 8), last=nn.Linear(8, 4))
    gradients = polycast.compare(model, torch.randn(5, 6), enabled=False, loss=mean_square).gradients
    assert {each.name for each in gradients if each.parameter} == {
        f"{name}.{parameter}" for name in ("first", "second", "last") for parameter in ("weight", "bias")
    }
    assert {each.total.relative for each in gradients} == {0.0}


@pytest.mark.parametrize("tuned", [False, True])
def test_a_model_that_another_call_compares_is_refused(in_thread, tuned):
    model, x, found = net(), torch.randn(5, 6), []

    def compare_part():
        if tuned:
            polycast.tune(model[0], x, tolerance=1.0)
        else:
            polycast.compare(model[0], x)

    def other():
        with pytest.raises(RuntimeError, match="Linear is in use by another call of polycast.compare or polycast.tune"):
            compare_part()
        found.append(polycast.compare(net(), x))

    def loss(output):
        if not found:
            in_thread(other)
        return mean_square(output)

    polycast.compare(model, x, loss=loss)
    assert found
    compare_part()
