"""Fingerprints: searches that could differ have different ones."""

import enum
import functools
import os
import subprocess
import sys
import threading
import types
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import polycast
from polycast.common import versions
from polycast.precision.calls import Call
from polycast.precision.fingerprint import Fingerprint

SETTINGS = {"tolerance": 1e-2, "device_type": "cpu", "dtype": torch.float16}
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
FACTOR = 1.0
helpers = None


def scaled(error):
    return error * FACTOR


def metric_of_a_global(output, reference):
    return scaled((output - reference).norm())


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
    made = Fingerprint(model, Call.of(model, inputs), metric)
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


def test_the_order_of_sets_in_code_does_not_count():
    one, two = (lambda a, b: a in {"x", "y", "z"}), (lambda a, b: a in {"x", "y", "z"})
    consts = tuple(frozenset(["z", "y", "x"]) if isinstance(c, frozenset) else c for c in two.__code__.co_consts)
    two.__code__ = two.__code__.replace(co_consts=consts)
    assert of(nn.Linear(4, 4), X, one)["metric"] == of(nn.Linear(4, 4), X, two)["metric"]


def test_values_without_a_digest_are_listed():
    model = nn.Linear(4, 4)
    model.compressor = zlib.compressobj()
    made = Fingerprint(model, Call.of(model, X), None)
    assert made.unknown == ["model: zlib.Compress in the model itself, compressor"]


def test_threads_and_locks_do_not_count():
    model = nn.Linear(4, 4)
    model.lock, model.thread = threading.Lock(), threading.Thread(target=print)
    assert of(model)


def test_values_that_raise_or_are_nested_too_deeply_have_no_digest():
    class Raises:
        def __reduce__(self):
            raise ValueError("not now")

        __slots__ = ()

    deep = []
    for _ in range(10_000):
        deep = [deep]
    model = nn.Linear(4, 4)
    model.raises, model.deep = Raises(), deep
    unknown = Fingerprint(model, Call.of(model, X), None).unknown
    assert [text.rpartition(", ")[2] for text in unknown] == ["deep", "raises"]


def tuned(state, model=None, inputs=X, metric=None, **settings):
    return polycast.tune(Layer() if model is None else model, inputs, metric, **{**SETTINGS, **settings}, state=state)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "search.json"


def refused(state, what, *arguments, differs="", **settings):
    content = state.read_bytes()
    expected = rf"belongs to another search: its {what} was .* now\. Name another file, or remove this one .*{differs}"
    with pytest.raises(ValueError, match=expected):
        tuned(state, *arguments, **settings)
    assert state.read_bytes() == content


def test_the_refusal_of_another_model_names_the_differences(state):
    tuned(state)
    model = Layer()
    model.norm.eps = 1e-3
    refused(state, "model", model, differs=r"Differences: module 'norm'\.$")
    model = Layer()
    other_class(model, forward=Other.forward)
    refused(state, "model", model, differs=r"Differences: class .*Layer")


@pytest.mark.parametrize("make", METRICS.values(), ids=METRICS)
def test_the_file_of_a_search_with_another_metric_is_refused(state, make):
    tuned(state, Layer(), X, make(1))
    assert tuned(state, Layer(), X, make(1)).met
    refused(state, "metric", Layer(), X, make(2))


def test_the_file_of_a_search_with_another_argument_is_refused(state):
    model = local_class(1.0)
    tuned(state, model, {"x": X, "addend": 1.0})
    refused(state, "inputs", model, {"x": X, "addend": 2.0}, differs=r"Differences: argument 'addend'\.$")


def test_the_file_of_a_search_with_another_policy_of_an_op_is_refused(state):
    tuned(state)
    registration = polycast.register_op("aten::linear", polycast.CastPolicy.FP32)
    try:
        refused(state, "register_op", differs=r"Differences: aten::linear\.$")
    finally:
        registration.remove()
    assert tuned(state).met


@pytest.mark.parametrize("what", ["polycast", "python", "torch"])
def test_the_file_of_another_version_is_refused(state, what, monkeypatch):
    tuned(state)
    before = versions.versions()
    monkeypatch.setattr("polycast.precision.tune.versions", lambda: {**before, what: "0.0"})
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0")
    refused(state, what)


class Reading(nn.Module):
    """Reads an environment variable."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * 2.0 ** float(os.environ["POLYCAST_TESTS_SCALE"])


def absolute(output, reference):
    return (output - reference).abs().max()


def test_a_search_whose_region_computes_something_else_is_refused(state, monkeypatch):
    monkeypatch.setenv("POLYCAST_TESTS_SCALE", "1")
    first = tuned(state, Reading(), X, absolute)
    assert tuned(state, Reading(), X, absolute) == first
    monkeypatch.setenv("POLYCAST_TESTS_SCALE", "2")
    expected = r"another search: the distance in the region without a policy was .*, and is .* now\. Something outside"
    with pytest.raises(ValueError, match=expected):
        tuned(state, Reading(), X, absolute)


def test_a_search_with_another_state_of_the_random_numbers_is_refused(state):
    model = nn.Sequential(Layer(), nn.Dropout())
    torch.manual_seed(0)
    tuned(state, model)
    assert tuned(state, model)
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="the distance in the region without a policy was"):
        tuned(state, model)


def test_a_search_with_noisy_distances_continues(state):
    noise = iter([1e-4, 2e-4, 1.5e-4, *[1e-4, 3e-4] * 20])

    class Noisy:
        def __call__(self, output, reference):
            return 1e-3 + next(noise)

    tuned(state, Layer(), X, Noisy(), budget=2)
    assert tuned(state, Layer(), X, Noisy(), budget=2).met


def test_parts_that_evaluations_change_do_not_count(state):
    calls, seen = [], []

    class Logging(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.layer, self.log = nn.Linear(4, 4), []

        def forward(self, x):
            type(self).calls += 1
            self.log.append(1)
            seen.append(x.dtype)
            return self.layer(x)

    def metric(output, reference):
        calls.append(1)
        return (output - reference).norm()

    model = Logging()
    first = tuned(state, model, X, metric)
    assert tuned(state, model, X, metric) == first
    model.layer.weight.data += 1
    refused(state, "model", model, X, metric, differs="Differences: module 'layer'")


def test_values_without_a_digest_are_warned_about(state):
    model = nn.Linear(4, 4)
    model.compressor = zlib.compressobj()
    expected = (
        r"^state='.*json' cannot detect changes of model: zlib\.Compress in the model itself, compressor\. "
        r"Name another file if they change\.$"
    )
    with pytest.warns(UserWarning, match=expected) as caught:
        tuned(state, model)
    assert caught[0].filename == __file__


SCRIPT = """
import torch
from torch import nn
from polycast.precision.calls import Call
from polycast.precision.fingerprint import Fingerprint
torch.manual_seed(0)

class Layer(nn.Module):
    names = {"a", "b", "c", "d"}

    def __init__(self):
        super().__init__()
        self.layer, self.labels = nn.Linear(4, 4), {name: 1 for name in self.names}
        self.register_forward_hook(lambda module, args, output: output)
        self.device, self.function = torch.device("cpu"), nn.functional.relu

    def forward(self, x):
        return self.layer(x) if "a" in {"a", "b", "c"} else x

model, x = Layer(), torch.ones(2, 4)
print(sorted((what, *item) for what, each in Fingerprint(model, Call.of(model, x), id).digests(set()).items()
    for item in each.items()))
"""


@pytest.mark.slow
def test_a_fingerprint_is_the_same_in_another_process():
    said = [
        subprocess.run(
            [sys.executable, "-c", f"{'x = object()' * n}\n{SCRIPT}"],
            env={**os.environ, "PYTHONHASHSEED": str(n)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for n in range(2)
    ]
    assert said[0] == said[1]
    assert "class __main__.Layer" in said[0]
