"""Fingerprints: searches that could differ have different ones."""

import enum
import functools
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import polycast
from polycast.precision.calls import ModelCall
from polycast.precision.fingerprint import Fingerprint

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
FACTOR = 1.0
helpers = None


def scaled(error):
    return error * FACTOR


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Config:
    width: int = 4
    color: Color = Color.RED


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Layer(nn.Module):
    """Has everything that a forward could use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("lost", torch.ones(4), persistent=False)
        self.plain = torch.ones(4)
        self.config, self.slots, self.several = Config(), Slots(1), [1, {"a": 2.0}, {3}]
        self.parts = [nn.Linear(4, 4)]

    def forward(self, x):
        return self.norm(self.layer(x)) * self.kept


class Other(Layer):
    def forward(self, x):
        return self.norm(self.layer(x)) * self.lost


def other_class(model, **methods):
    """Replace the class of a model by one of the same name with other methods."""
    model.__class__ = types.new_class("Layer", (Layer,), exec_body=lambda space: space.update(methods))
    model.__class__.__qualname__, model.__class__.__module__ = Layer.__qualname__, Layer.__module__


def hook(module, args, output):
    return output + 1


def other_hook(module, args, output):
    return output + 2


def set_in(name, attribute, value):
    return lambda model: setattr(model.get_submodule(name), attribute, value)


CHANGES = {
    "a parameter": lambda model: model.layer.weight.data.add_(1.0),
    "an attribute": set_in("norm", "eps", 1e-3),
    "a new attribute": set_in("norm", "more", 1),
    "a buffer": lambda model: model.kept.add_(1),
    "a buffer that is not persistent": lambda model: model.lost.add_(1),
    "a tensor": lambda model: model.plain.add_(1),
    "a value in a dataclass": lambda model: setattr(model.config, "width", 5),
    "an enum": lambda model: setattr(model.config, "color", Color.BLUE),
    "a slot": lambda model: setattr(model.slots, "value", 2),
    "an item": lambda model: model.several.append(1),
    "an item in an item": lambda model: model.several[1].update(a=3.0),
    "a type of a number": lambda model: model.several.__setitem__(0, 1.0),
    "an item of a set": lambda model: model.several[2].add(4),
    "a module in a list": lambda model: model.parts[0].weight.data.add_(1),
    "the mode of a module": lambda model: model.norm.eval(),
    "another module": lambda model: setattr(model, "norm", nn.Identity()),
    "another order of modules": lambda model: model._modules.update(layer=model._modules.pop("layer")),
    "a hook": lambda model: model.layer.register_forward_hook(hook),
    "a hook before": lambda model: model.layer.register_forward_pre_hook(lambda module, args: args),
    "a forward of its own": lambda model: setattr(model, "forward", lambda x: x + 1),
    "the code of forward": lambda model: other_class(model, forward=Other.forward),
    "another method": lambda model: other_class(model, helper=lambda self: 1),
    "a rule": lambda model: polycast.apply_policy(model, polycast.Policy(modules={"layer": "fp32"})),
}


def of(model, inputs=X, metric=None):
    made = Fingerprint(model, (ModelCall.of(model, inputs),), metric)
    assert made.unknown == []
    return made.digests(set())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_digest_of_a_model_changes_with(change):
    model = Layer()
    before = of(model)
    assert of(Layer()) == of(model) == before
    change(model)
    after = of(model)
    assert after["model"] != before["model"]
    assert after["inputs"] == before["inputs"]


def test_the_digest_depends_on_the_code_of_hooks():
    one, two, three = Layer(), Layer(), Layer()
    one.layer.register_forward_hook(hook).remove()
    for model, function in ((one, hook), (two, hook), (three, other_hook)):
        model.layer.register_forward_hook(function)
    assert of(one) == of(two) != of(three)


def local_class(scale, addend=0.0):
    class Local(nn.Module):
        factor = 1.0

        def helper(self, x):
            return x * scale

        def forward(self, x, *, addend=addend):
            return self.helper(x) * self.factor + addend

    return Local()


def test_the_digest_depends_on_variables_and_defaults_of_local_classes():
    assert of(local_class(1.0)) == of(local_class(1.0))
    assert of(local_class(1.0)) != of(local_class(2.0))
    assert of(local_class(1.0)) != of(local_class(1.0, 1.0))
    other = local_class(1.0)
    type(other).factor = 2.0
    assert of(other) != of(local_class(1.0))


def test_the_digest_depends_on_globals_that_the_code_names(monkeypatch):
    class Scaled(nn.Module):
        def forward(self, x):
            return scaled(x)

    before = of(Scaled())
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    after = of(Scaled())
    assert after != before
    assert {key for key in before["model"] if before["model"][key] != after["model"][key]} == {f"{__name__}.FACTOR"}
    monkeypatch.setitem(globals(), "scaled", lambda error: error)
    assert of(Scaled()) != after


def scaled_by_a_global(x):
    return x * helpers.inner.scale


def scaled_by_an_import(x):
    import helpers_of_a_user as local

    return x * local.inner.scale


@pytest.mark.parametrize("way", ["a variable", "a global", "an import"])
def test_the_digest_depends_on_names_in_other_modules(monkeypatch, way):
    local = types.ModuleType("helpers_of_a_user")
    local.inner = types.ModuleType("helpers_of_a_user.inner")
    local.inner.scale = local.inner.unused = 1.0
    monkeypatch.setitem(sys.modules, local.__name__, local)
    monkeypatch.setitem(globals(), "helpers", local)
    model = nn.Linear(4, 4)
    ways = {"a variable": lambda x: x * local.inner.scale, "a global": scaled_by_a_global}
    model.forward = ways.get(way, scaled_by_an_import)
    before = of(model)
    local.inner.unused = 2.0
    assert of(model) == before
    local.inner.scale = 2.0
    assert of(model) != before


INPUTS = {
    "a tensor": (torch.ones(2, 4), torch.zeros(2, 4)),
    "a number": ((X, 1.0), (X, 2.0)),
    "a flag": ((X, True), (X, 1)),
    "by name": ({"x": X, "flag": True}, {"x": X, "flag": False}),
    "a name": ({"x": X}, {"y": X}),
    "a text": ((X, "a"), (X, "b")),
    "a container": ((X, [1, (2, None)]), (X, [1, (2, ...)])),
    "a dtype": ((X, torch.float16), (X, torch.bfloat16)),
    "a dtype of a tensor": (torch.zeros(2, dtype=torch.int32), torch.zeros(2)),
    "a shape": (torch.zeros(2, 4), torch.zeros(4, 2)),
    "a slice": ((X, slice(0, torch.ones(1))), (X, slice(0, torch.zeros(1)))),
    "a large number": ((X, 10**5000), (X, 10**5000 + 1)),
    "a sparse tensor": (torch.eye(4).to_sparse(), (2 * torch.eye(4)).to_sparse()),
    "a conjugate": (torch.ones(2, dtype=torch.cfloat) * 1j, (torch.ones(2, dtype=torch.cfloat) * 1j).conj()),
    "an array": ((X, torch.ones(2).numpy()), (X, torch.zeros(2).numpy())),
    "a path": ((X, Path("a")), (X, Path("b"))),
    "an object": ((X, Config(4)), (X, Config(5))),
    "a text of a class": ((X, type("Text", (str,), {})("a")), (X, type("Text", (str,), {})("b"))),
}


@pytest.mark.parametrize(("one", "two"), INPUTS.values(), ids=INPUTS)
def test_the_digest_of_inputs_changes_with(one, two):
    model = nn.Linear(4, 4)
    assert of(model, one) == of(model, one) != of(model, two)


def closure(power):
    inner = lambda error: error**power  # noqa: E731

    def metric(output, reference):
        return inner((output - reference).norm())

    return metric


def with_default(power=1):
    return lambda output, reference, power=power: (output - reference).norm() ** power


class Metric:
    def __init__(self, power):
        self.power = power

    def __call__(self, output, reference):
        return (output - reference).norm() ** self.power

    distance = __call__


class ModuleMetric(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.power = power

    def forward(self, output, reference):
        return (output - reference).norm() ** self.power


def power_metric(power, output, reference, *, factor=1):
    return factor * (output - reference).norm() ** power


def cyclic(power):
    metric = Metric(power)
    metric.itself = metric.again = [metric]
    return metric


METRICS = {
    "a partial": lambda power: functools.partial(power_metric, power),
    "a partial by name": lambda power: functools.partial(power_metric, 1, factor=power),
    "a partial of a partial": lambda power: functools.partial(functools.partial(power_metric, power), factor=1),
    "a closure": closure,
    "a partial of a closure": lambda power: functools.partial(closure(power)),
    "a default": with_default,
    "an object": Metric,
    "a method": lambda power: Metric(power).distance,
    "a module": ModuleMetric,
    "a method of a module": lambda power: ModuleMetric(power).forward,
    "an object with a cycle": cyclic,
    "a cached function": lambda power: functools.lru_cache(closure(power)),
    "a decorated function": lambda power: torch.no_grad()(closure(power)),
}


@pytest.mark.parametrize("make", METRICS.values(), ids=METRICS)
def test_the_digest_of_a_metric_depends_on_its_contents(make):
    model = nn.Linear(4, 4)
    assert of(model, X, make(1)) == of(model, X, make(1)) != of(model, X, make(2))
