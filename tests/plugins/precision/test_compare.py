"""``compare`` with models whose errors are known."""

import contextvars
import functools
import json
import math
import threading

import pytest
import torch
from tests.plugins.models import Defined, by_name, distance
from torch import nn

import polycast

FLOAT32 = {"linear": "fp32"}
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def residual(width):
    return Defined(lambda self, x: self.a(x) + self.b(x), a=nn.Linear(width, width), b=nn.Linear(width, width))


def attention(width):
    """Return a module that computes the product of queries and keys itself."""
    q, k = nn.Linear(width, width), nn.Linear(width, width)
    return Defined(lambda self, x: torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1), q=q, k=k)


def gated(forward):
    return Defined(forward, **{name: nn.Linear(4, 4) for name in ("gate", "one", "two")})


def test_errors_are_those_of_the_output_in_a_region_and_on_the_inputs_of_float32(engine):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 8)
    found = by_name(polycast.compare(model, x))
    with torch.no_grad():
        hidden, expected = model[:2](x), model(x)
        with polycast.autocast("cpu"):
            error = model(x).float() - expected
    assert found["2"].total.max == pytest.approx(error.abs().max().item(), rel=1e-5)
    assert found["2"].total.relative == pytest.approx(distance(model, x, {}), rel=1e-5)
    assert found["2"].own.relative == pytest.approx(distance(model[2], hidden, {}), rel=1e-5)
    assert (found["0"].inherited, found["1"].own.relative) == (0.0, 0.0)
    assert found["1"].inherited == found["1"].total.relative > 0


def test_the_own_error_of_a_container_excludes_the_modules_in_it():
    found = by_name(polycast.compare(nn.Sequential(residual(8), attention(8)), torch.randn(3, 8)))
    assert found["0"].own.relative == 0.0
    assert found["0"].total.relative > 0
    assert found["1"].own.relative > 0


def test_a_module_that_amplifies_a_small_error_adds_the_growth_and_comes_first():
    norm = Defined(lambda self, x: x * torch.rsqrt((x * x).sum(-1, keepdim=True)))
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(norm, nn.ReLU()))
    with torch.no_grad():
        model[0].weight.mul_(1000.0)
    comparison = polycast.compare(model, torch.randn(3, 8), dtype=torch.float16)
    found = by_name(comparison)
    adds = [module.adds for module in comparison.modules]
    assert adds == sorted(adds, reverse=True)
    assert comparison.modules[0].name == "1.0"
    assert found["1.0"].own.relative == 0.0
    assert found["1.0"].adds == pytest.approx(1.0, abs=0.01)
    assert found["1"].adds == found[""].adds == 0.0


def test_the_first_module_that_makes_inf_or_nan_is_named(engine):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.LayerNorm(8))
    with torch.no_grad():
        model[1][0].weight.fill_(1e5)
    comparison = polycast.compare(model, torch.rand(3, 8) + 1, dtype=torch.float16)
    found = by_name(comparison)
    assert comparison.first_nonfinite == "1.0"
    assert [name for name, module in found.items() if module.makes_nonfinite] == ["1.0"]
    assert found["1.0"].total.inf + found["1.0"].total.nan == found["1.0"].total.made == 24
    assert math.isnan(found["1.0"].total.cosine)


def test_an_overflow_outside_of_the_inner_modules_counts_for_the_container():
    model = residual(4)
    with torch.no_grad():
        for layer in (model.a, model.b):
            layer.weight.fill_(10_000.0)
    comparison = polycast.compare(model, torch.ones(1, 4), dtype=torch.float16)
    assert comparison.first_nonfinite == ""
    assert [module.name for module in comparison.modules if module.makes_nonfinite] == [""]


def test_the_same_inf_and_nan_as_in_float32_are_no_error():
    masked = Defined(lambda self, x: x.masked_fill(x > 0, -math.inf))
    model, x = nn.Sequential(nn.Linear(4, 4), masked), torch.randn(3, 4)
    with pytest.warns(UserWarning, match=r"^float32's own output has \d+ inf among its 12 elements") as caught:
        comparison = polycast.compare(model, x)
    assert len(caught) == 1
    error = comparison.outputs["output"]
    assert error.inf > error.made == 0
    assert math.isfinite(error.relative)
    assert comparison.first_nonfinite is None


def test_a_module_with_two_names_and_several_calls_is_one_row():
    layer = nn.Linear(4, 4)
    twice = Defined(lambda self, x: self.second(self.first(x).tanh()), first=layer, second=layer)
    found = by_name(polycast.compare(twice, torch.randn(3, 4)))
    assert (list(found), found["first"].calls) == (["first", ""], 2)


def test_arguments_come_as_tensor_tuple_or_dict():
    two = Defined(lambda self, x, *, scale: {"scaled": self.layer(x) * scale, "count": 3}, layer=nn.Linear(4, 4))
    x, scale = torch.randn(2, 4), torch.tensor(2.0)
    comparison = polycast.compare(two, {"x": x, "scale": scale})
    assert list(comparison.outputs) == ["scaled"]
    assert list(polycast.compare(nn.Linear(4, 4), (x,)).outputs) == ["output"]


def test_runs_that_make_different_calls_are_matched_again_afterwards():
    chooses = gated(lambda self, x: self.one(x) if self.gate(x).dtype is torch.float32 else self.two(x))
    comparison = polycast.compare(nn.Sequential(nn.Linear(4, 4), chooses, nn.Linear(4, 4)), X)
    found = by_name(comparison)
    assert comparison.parted == ("1",)
    assert found["1.one"].total is None
    assert found["1.one"].own.relative > 0
    assert None not in (found["1.gate"].total, found["1"].total, found["2"].total, found[""].total)


def test_calls_in_another_order_are_matched():
    def forward(self, x):
        first = self.gate(x).dtype is torch.float32
        layers = (self.one, self.two) if first else (self.two, self.one)
        return sum(layer(x) for layer in layers)

    found = by_name(polycast.compare(gated(forward), X))
    assert found["one"].total.relative < 0.1


def test_compare_gives_the_same_inside_a_region():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    outside = polycast.compare(model, X, dtype=torch.float16)
    with polycast.autocast("cpu", policy=FLOAT32):
        assert polycast.compare(model, X, dtype=torch.float16) == outside


def test_a_comparison_can_be_printed_and_written_as_json():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        model[0].weight.fill_(1e6)
    comparison = polycast.compare(model, torch.ones(2, 4), dtype=torch.float16)
    said = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert (said["schema"], said["dtype"], said["first_nonfinite"]) == (1, "float16", "0")
    assert (said["modules"][0]["name"], said["modules"][0]["own"]["relative"]) == ("0", "inf")
    text = str(comparison)
    assert "The first inf or nan: 0." in text
    assert "(model)   Sequential" in text


def test_texts_are_ascii():
    class Größe(nn.Linear):
        pass

    model = nn.Sequential(Größe(4, 4))
    tuned = polycast.tune(model, X, tolerance=1.0)
    for value in (polycast.compare(model, X), tuned, tuned.evidence):
        str(value).encode("ascii")


SCRIPTED = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
REFUSED = [
    (
        (nn.Linear(2, 2), 3),
        {},
        TypeError,
        r"^inputs must be a tensor, a tuple of arguments or a dict of keyword arguments for the model's forward; got "
        r"int\. Put a single argument of another type into a tuple: \(argument,\)\.$",
    ),
    ((nn.Linear(4, 4), X), {"dtype": torch.float64}, RuntimeError, r"An enabled region is needed\."),
    ((SCRIPTED, X), {}, TypeError, r"^the model is a ScriptModule, whose calls of modules are not visible to Python\."),
]


def test_what_cannot_be_compared_is_refused(subtests):
    for args, settings, error, problem in REFUSED:
        with subtests.test(problem=problem), pytest.raises(error, match=problem):
            polycast.compare(*args, **settings)


def test_a_scripted_module_counts_for_its_caller():
    assert set(by_name(polycast.compare(nn.Sequential(nn.Linear(4, 4), SCRIPTED), X))) == {"", "0"}


def test_calls_in_threads_of_the_model_are_ignored(in_thread):
    def forward(self, x):
        in_thread(lambda: self.layer(x.detach()))
        return self.layer(x)

    found = by_name(polycast.compare(Defined(forward, layer=nn.Linear(4, 4)), X))
    assert found["layer"].calls == 1
    assert "polycast.compare" not in {thread.name for thread in threading.enumerate()}


def test_both_runs_are_in_the_context_of_the_caller():
    scale = contextvars.ContextVar("scale", default=0.0)

    def forward(self, x):
        y = x * scale.get()
        scale.set(100.0)
        return y

    def compared():
        scale.set(3.0)
        return polycast.compare(nn.Sequential(nn.Linear(4, 4), Defined(forward)), X, policy=FLOAT32)

    comparison = contextvars.copy_context().run(compared)
    assert {(module.own.relative, module.total.relative) for module in comparison.modules} == {(0.0, 0.0)}
    assert comparison.outputs["output"].cosine == pytest.approx(1.0)


@pytest.mark.parametrize(
    "function",
    [polycast.compare, *(functools.partial(polycast.tune, tolerance=1e-3, over=over) for over in ("modules", "ops"))],
    ids=["compare", "tune", "tune over ops"],
)
@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm1d(4), lambda: nn.ReLU(inplace=True)], ids=["writes a buffer", "writes its argument"]
)
@pytest.mark.parametrize("made_in_it", [False, True])
def test_inference_mode_changes_nothing(engine, function, make, made_in_it):
    def found():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4))
        return model, torch.randn(8, 4)

    model, x = found()
    expected = function(model, x)
    with torch.inference_mode():
        model, x = found() if made_in_it else (model, x)
        assert function(model, x) == expected
        assert torch.is_inference_mode_enabled()


def test_a_reference_without_a_finite_element_is_warned_about():
    broken = Defined(lambda self, x: {"a": x * math.nan, "b": x * math.inf, "c": x.long()})
    expected = (
        r"^float32's own output has 4 inf and 4 nan among its 8 elements, and no finite one: their error "
        r"is unknown\. polycast\.observe\(\) names the op that makes the first of them\.$"
    )
    with pytest.warns(UserWarning, match=expected):
        polycast.compare(broken, torch.ones(1, 4))
