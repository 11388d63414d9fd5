"""``polycast.calibrate``: what it sees of a model, and what it leaves as it was."""

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from tests.plugins.models import Defined
from torch import nn

import polycast
from polycast import Int8
from polycast.plugin import events
from polycast_plugins.fastest import estimates
from polycast_plugins.quantize.products import Activations

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")

RECIPE = Int8(min_size=0)
LARGE = [1, 5]


def with_outliers(rows=16, terms=32):
    x = torch.randn(rows, terms)
    x[:, LARGE] *= 200
    return x


def small_channels(weight, dim=1):
    """Make the channels of a weight small that are large in `with_outliers`."""
    with torch.no_grad():
        weight.index_copy_(dim, torch.tensor(LARGE), weight.index_select(dim, torch.tensor(LARGE)) / 200)
    return weight


def functional():
    """Return a model that multiplies by its parameters in each of the ways that a recipe computes."""

    def forward(self, x):
        parts = F.linear(x, self.experts[1]), F.linear(x, self.rows[:8])
        outputs = F.linear(x, self.linear), x @ self.transposed.t(), torch.mm(x, self.mm), x[None] @ self.matmul
        return *outputs, torch.addmm(torch.zeros(24), x, self.addmm), *parts

    by_columns = dict.fromkeys(("linear", "transposed", "rows"), (24, 32))
    sizes = {**by_columns, **dict.fromkeys(("addmm", "mm", "matmul"), (32, 24)), "experts": (3, 24, 32)}
    weights = {name: small_channels(torch.randn(size), size.index(32)) for name, size in sizes.items()}
    return Defined(forward, **{name: nn.Parameter(weight) for name, weight in weights.items()})


def named(calibration):
    return {each.name: each for each in calibration.weights}


def test_products_of_every_op_are_seen_also_outside_of_modules_with_factors_for_their_matrices(engine):
    model = functional()
    e = polycast.calibrate(model, [with_outliers()], RECIPE)
    names = ("linear", "transposed", "mm", "matmul", "addmm", "experts[768,24,32,32,1]", "rows[0,8,32,32,1]")
    assert named(e).keys() == set(names)
    for each in e.weights:
        assert each.error < 0.02 < 0.1 < each.plain_error, each
    for matrix in (model.linear, model.transposed, model.mm.t(), model.matmul.t(), model.experts[1], model.rows[:8]):
        factors = e.factors(matrix)
        assert (factors.shape, factors.dtype) == ((32,), torch.float32)
        assert factors[LARGE].min() > 4 * factors.median()
        assert factors.min() >= 1
    assert [e.factors(matrix) for matrix in (model.experts[0], model.rows, model.mm)] == [None] * 3


def test_a_tied_weight_has_its_first_name_and_one_calibration():
    model = nn.ModuleDict({"embedding": nn.Embedding(40, 32), "head": nn.Linear(32, 40, bias=False)})
    model.head.weight = model.embedding.weight
    model.forward = lambda tokens: model.head(model.embedding(tokens))
    found = polycast.calibrate(model, [torch.arange(40)], RECIPE)
    assert [each.name for each in found.weights] == ["embedding.weight"]


def test_equal_weights_share_the_factors_for_the_activations_of_both():
    first, second = nn.Linear(32, 24, bias=False), nn.Linear(32, 24, bias=False)
    second.load_state_dict(first.state_dict())

    both = Defined(lambda self, x: (self.first(x), self.second(x.flip(1))), first=first, second=second)
    found = named(polycast.calibrate(both, [with_outliers()], RECIPE))
    factors = found["first.weight"].factors
    assert torch.equal(found["second.weight"].factors, factors)
    assert factors.topk(4).indices.sort().values.tolist() == sorted([*LARGE, *(31 - each for each in LARGE)])


def test_a_parameter_that_is_multiplied_both_ways_has_a_calibration_of_each():
    autoencoder = Defined(
        lambda self, x: F.linear(x, self.weight) @ self.weight, weight=nn.Parameter(torch.randn(24, 32))
    )
    found = named(polycast.calibrate(autoencoder, [torch.randn(8, 32)], RECIPE))
    assert {name: each.shape for name, each in found.items()} == {"weight": (24, 32), "weight[transposed]": (32, 24)}


def linear(**settings):
    layer = nn.Linear(32, 24, **settings)
    small_channels(layer.weight.data)
    return layer


@pytest.mark.parametrize(
    "batches",
    [
        lambda x: [x],
        lambda x: [(x,)],
        lambda x: [[x]],
        lambda x: [{"input": x}],
        lambda x: (each for each in x.split(4)),
        lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4),
    ],
    ids=["tensor", "tuple", "list", "dict", "generator", "DataLoader"],
)
def test_each_kind_of_batches_is_read_once(batches):
    x = with_outliers()
    layer = linear()
    (found,) = polycast.calibrate(layer, batches(x), RECIPE).weights
    (expected,) = polycast.calibrate(layer, [x], RECIPE).weights
    assert found.strength == expected.strength > 0
    assert torch.equal(found.factors, expected.factors)


def test_a_weight_that_gains_nothing_gets_no_factors():
    layer = nn.Linear(32, 24)
    with torch.no_grad():
        layer.weight.sign_()
    (found,) = polycast.calibrate(layer, [torch.randn(64, 32).sign()], RECIPE).weights
    assert (found.factors, found.strength, found.error) == (None, 0, found.plain_error)


def test_a_channel_that_was_always_zero_gets_a_usual_factor():
    x, layer = with_outliers(), linear()
    x[:, 7] = 0
    with torch.no_grad():
        layer.weight[:, 9] = 0
    factors = polycast.calibrate(layer, [x], RECIPE).factors(layer.weight)
    assert factors.isfinite().all()
    assert factors[7] < factors[LARGE].min()


def test_weights_are_seen_whose_products_by_as_many_rows_are_slower(profile_of, monkeypatch):
    profile = profile_of(overhead=1e-15, cast=1e-15, bfloat16=0.1, int8=1.0)
    monkeypatch.setattr(estimates, "find", lambda device_type: profile)
    layer, x = linear(), with_outliers()
    with torch.no_grad(), polycast.autocast("cpu"):
        explained = polycast.explain("linear", x, layer.weight, layer.bias, device_type="cpu", recipe=RECIPE)
    assert "int8 takes" in explained.declined
    assert polycast.calibrate(layer, [x], RECIPE).factors(layer.weight) is not None


def test_small_weights_and_modules_with_a_rule_are_left_out():
    model = nn.Sequential(linear(), nn.Linear(24, 32), nn.Linear(32, 32))
    with polycast.apply_policy(model, polycast.Policy(modules={"0": "none"})):
        found = polycast.calibrate(model, [with_outliers()], Int8(min_size=1000))
    assert [each.name for each in found.weights] == ["2.weight"]


def stateful():
    def forward(self, x):
        self.calls += 1
        self.last = self.layer(self.drop(self.norm(x)))
        return self.last

    return Defined(forward, norm=nn.BatchNorm1d(32), drop=nn.Dropout(0.5), layer=linear(), calls=0, last=None)


@pytest.mark.parametrize("fails", [False, True], ids=["complete", "failing"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training, fails, engine):
    model = stateful().train(training)
    model.drop.train(not training)

    def state():
        tensors = {name: (value.tolist(), value._version) for name, value in model.state_dict().items()}
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        return tensors, hooks, [module.training for module in model.modules()], torch.get_rng_state().tolist()

    batches = [with_outliers(), torch.randn(4, 31) if fails else with_outliers()]
    before = state()
    outcome = pytest.raises(RuntimeError, match="running_mean") if fails else contextlib.nullcontext()
    with outcome, polycast.autocast("cpu", torch.float16):
        polycast.calibrate(model, batches, RECIPE)
    assert state() == before
    assert (model.calls, model.last) == (0, None)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not events.calibration


def test_the_products_are_computed_in_float32(engine):
    seen, layer, x = [], linear(), with_outliers()
    polycast.calibrate(Defined(lambda self, x: seen.append(self.layer(x)), layer=layer), [x], RECIPE)
    assert torch.equal(seen[0], F.linear(x, layer.weight, layer.bias).bfloat16())


def test_the_sample_of_activations_does_not_grow_and_is_of_all_rows_alike():
    found = Activations(1, torch.device("cpu"), torch.Generator().manual_seed(0))
    for each in torch.arange(20000.0).split(700):
        found.add(each[:, None])
    assert len(found.rows) == len(found.rows.unique()) == 64
    assert 8000 < found.rows.mean() < 12000


def test_products_of_other_threads_are_computed_as_before(engine, in_thread):
    layer, other, x = linear(), linear(), with_outliers()

    def product():
        with torch.no_grad(), polycast.autocast("cpu", recipe=RECIPE):
            return other(x)

    expected, results = product(), []

    def forward(self, x):
        results.append(in_thread(product))
        return self.layer(x)

    found = polycast.calibrate(Defined(forward, layer=layer, other=other), [x], RECIPE)
    assert [each.name for each in found.weights] == ["layer.weight"]
    assert torch.equal(results[0], expected)


@pytest.mark.slow
def test_a_compiled_model_has_the_names_of_the_model():
    model = nn.Sequential(linear(), nn.ReLU())
    x = [with_outliers()]
    assert polycast.calibrate(torch.compile(model, backend="eager"), x, RECIPE) == polycast.calibrate(model, x, RECIPE)


def branches():
    """Return a model that multiplies one part of its inputs by each layer."""
    first, second = nn.Linear(32, 24), nn.Linear(32, 24)
    return Defined(lambda self, x, y: (self.first(x), self.second(y)), first=first, second=second)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_data_without_finite_values_are_refused_and_rows_without_do_not_matter_beside_others(value):
    x = torch.full((8, 32), 1.0)
    x[:, 3] = value
    message = (
        "'second.weight' got inf or nan in each row of the activations: check the batches. polycast.observe() names "
        "the op that makes the first of them."
    )
    batches = [(torch.randn(8, 32), x)]
    with pytest.raises(ValueError, match=re.escape(message)):
        polycast.calibrate(branches(), batches, RECIPE)
    x[0, 3] = 1.0
    assert polycast.calibrate(branches(), batches, RECIPE).weights[1].error > 0


def test_a_weight_that_is_multiplied_by_no_rows_is_left_out():
    found = polycast.calibrate(branches(), [(torch.randn(8, 32), torch.randn(0, 32))], RECIPE)
    assert [each.name for each in found.weights] == ["first.weight"]


X = torch.randn(2, 32)
WRONG = [
    (lambda x: x, [X], "int8", TypeError, "model must be a torch.nn.Module, got function"),
    (nn.Linear(32, 24), [], RECIPE, ValueError, "there are no batches"),
    (nn.Linear(32, 24), X, RECIPE, TypeError, "got Tensor. Put a single batch into a list, [batch]"),
    (nn.Linear(32, 24), (X,), RECIPE, TypeError, "got tuple. Put a single batch into a list, [batch]"),
    (nn.Linear(32, 24), {"input": X}, RECIPE, TypeError, "got dict. Put a single batch into a list, [batch]"),
    (nn.Linear(32, 24), 3, RECIPE, TypeError, "batches must be an iterable of batches"),
    (nn.Linear(32, 24), [3], RECIPE, TypeError, "inputs must be a tensor, a tuple of arguments or a dict"),
    (nn.Linear(32, 24), [X], "float8", ValueError, "Float8() takes no calibration"),
    (nn.Linear(32, 24), [X], "none", ValueError, "NoRecipe() takes no calibration"),
    (nn.Linear(32, 24), [X], "int9", ValueError, "'int9' is not a recipe"),
    (nn.ReLU(), [X], RECIPE, ValueError, "ReLU has no parameters, so there is nothing to calibrate"),
    (nn.LayerNorm(32), [X], RECIPE, ValueError, "computes no product with a weight of the model on cpu"),
    (nn.Linear(32, 24), [X], "int8", ValueError, "polycast.compare(model, inputs, recipe='int8')"),
]


def test_wrong_arguments_are_refused(subtests):
    for model, batches, recipe, error, message in WRONG:
        refusal = pytest.raises(error, match=re.escape(message))
        with subtests.test(recipe=recipe, message=message), refusal:
            polycast.calibrate(model, batches, recipe)


def test_a_calibration_in_the_recipe_is_not_used():
    layer, x = linear(), [with_outliers()]
    first = polycast.calibrate(layer, x, RECIPE)
    assert polycast.calibrate(layer, x, Int8(min_size=0, calibration=first)) == first
