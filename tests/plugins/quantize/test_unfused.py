"""LSTMs and products of experts in regions with a recipe, which torch computes in ops that recipes do not reach."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import polycast

RECIPE = polycast.Int8(min_size=1)


@pytest.fixture(autouse=True)
def _inference(engine, int8_kernels):
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def small_pays(monkeypatch):
    """Take every LSTM for large enough."""
    from polycast_plugins.quantize import unfused

    monkeypatch.setattr(unfused, "_LARGE", 1)


@pytest.fixture
def run(recipe_counts):
    """Return a function that calls a layer in a region with the recipe; it returns the counts too, by op and reason."""

    def run(layer, *args, **options):
        with recipe_counts() as counts, polycast.autocast("cpu", recipe=RECIPE):
            result = layer(*args, **options)
        return result, {(each.op, each.declined): each.calls for each in counts.records()}

    return run


def grouped_mm(*args, **options):
    return functional.grouped_mm(*args, **options)  # as it is in the region


def flat(outputs):
    y, states = outputs
    return [y, *states]


def error(actual, expected):
    return (actual.float() - expected).norm() / expected.norm()


LAYERS = {
    "one layer": ({}, (3, 5, 24), 4),
    "without a batch": ({}, (3, 24), 4),
    "batch first": ({"batch_first": True}, (3, 5, 24), 6),
    "without biases": ({"bias": False}, (3, 5, 24), 4),
    "two layers, both directions": ({"num_layers": 2, "bidirectional": True}, (3, 5, 24), 16),
}


@pytest.mark.parametrize(("options", "size", "linears"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_an_lstm_is_computed_by_linears_in_the_recipe(small_pays, run, options, size, linears, states):
    layer, x = nn.LSTM(24, 16, **options).eval(), torch.randn(size)
    given = tuple(map(torch.randn_like, layer(x)[1])) if states else None
    outputs, counts = run(layer, x, given)
    assert counts == {("aten::linear", ""): linears}
    for ours, torchs in zip(flat(outputs), flat(layer(x, given)), strict=True):
        assert (ours.dtype, ours.shape) == (torch.bfloat16, torchs.shape)
        assert error(ours, torchs) < 0.03


def test_one_step_is_computed_by_the_recipe_and_several_if_the_weights_are_large(run):
    for length, count in ((1, 2), (2, 0)):
        assert sum(run(nn.LSTM(24, 16).eval(), torch.randn(length, 5, 24))[1].values()) == count


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_packed_sequences_and_projections_are_left_to_torch(small_pays, run):
    x = torch.randn(3, 2, 24)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
    for layer, given in ((nn.LSTM(24, 16), packed), (nn.LSTM(24, 16, proj_size=8), x)):
        with polycast.autocast("cpu"):
            expected = layer.eval()(given)[1][0]
        with polycast.autocast("cpu", recipe=RECIPE.with_options(ops=["mm"])):
            assert torch.equal(layer(given)[1][0], expected)
        assert run(layer, given)[0][1][0].shape == expected.shape


REGIONS = {
    "no recipe": {"recipe": "none"},
    "disabled": {"recipe": RECIPE, "enabled": False},
    "not for linears": {"recipe": polycast.Int8(ops=["conv2d"], min_size=1)},
    "policies": {"recipe": RECIPE, "policy": {"linear": "fp32", "mm": "fp32"}},
    "small weights": {"recipe": polycast.Int8()},
}


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_regions_whose_recipe_does_not_compute_them_leave_them_to_torch(small_pays, region):
    layer, x = nn.LSTM(24, 16).eval(), torch.randn(3, 5, 24)
    rows, experts, ends = operands()
    with polycast.autocast("cpu", **{**region, "recipe": "none", "policy": None}):
        expected, products = layer(x)[0], functional.grouped_mm(rows, experts, offs=ends)
    with polycast.autocast("cpu", **region):
        assert torch.equal(layer(x)[0], expected)
        assert torch.equal(functional.grouped_mm(rows, experts, offs=ends), products)


def test_what_autograd_records_is_left_to_torch(small_pays, run):
    layer = nn.LSTM(24, 16)
    rows, experts, ends = operands()
    with torch.enable_grad():
        (y, _), of_layer = run(layer, torch.randn(3, 5, 24))
        products, of_experts = run(grouped_mm, rows, experts.requires_grad_(), offs=ends)
        y.float().sum().backward()
        (products * torch.randn(11, 32)).sum().backward()
    assert {**of_layer, **of_experts}.keys().isdisjoint({("aten::linear", ""), ("aten::mm", "")})
    assert layer.weight_hh_l0.grad is not None
    assert experts.grad is not None


def test_a_training_lstm_with_dropout_is_left_to_torch(small_pays, run):
    assert run(nn.LSTM(24, 16, num_layers=2, dropout=0.5), torch.randn(3, 5, 24))[1] == {}


def operands(count=4, rows=11):
    """Return rows, experts [count, 16, 32] as a transposed view, and the ends of the rows of each expert."""
    weights = nn.Parameter(torch.randn(count, 32, 16), requires_grad=False)
    return torch.randn(rows, 16), weights.transpose(1, 2), torch.tensor([3, 3, 10, 11][:count], dtype=torch.int32)


def test_experts_with_rows_are_computed_by_the_recipe_one_by_one(run):
    rows, experts, ends = operands()
    actual, counts = run(grouped_mm, rows, experts, offs=ends)
    alone, of_one = run(torch.matmul, rows[3:10], experts[2])
    assert (counts, of_one) == ({("aten::mm", ""): 3}, {("aten::matmul", ""): 1})
    assert actual.dtype is torch.bfloat16
    assert error(actual, functional.grouped_mm(rows, experts, offs=ends)) < 0.03
    assert torch.equal(actual[3:10], alone)


def test_rows_after_the_last_end_are_zero(run):
    rows, experts, ends = operands(count=3, rows=14)
    actual, _ = run(grouped_mm, rows, experts, offs=ends)
    assert actual.shape == (14, 32)
    assert actual[9].any()
    assert not actual[10:].any()


def test_wrong_sizes_have_torchs_error(run):
    rows, experts, ends = operands()
    with pytest.raises(RuntimeError):
        run(grouped_mm, rows[:, :8], experts, offs=ends)


def test_an_lstm_is_scripted_in_a_region_with_a_recipe():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(24, 16)

        def forward(self, x):
            return self.layer(x)[0]

    model, x = Model().eval(), torch.randn(1, 5, 24)
    with polycast.autocast("cpu", recipe=RECIPE):
        scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x))


def test_a_compiled_lstm_is_computed_as_without_compiling(small_pays, fresh_dynamo, run):
    layer, x = nn.LSTM(24, 16).eval(), torch.randn(3, 5, 24)
    compiled = torch.compile(lambda x: layer(x), backend="eager")
    for _ in range(2):
        torch.testing.assert_close(run(compiled, x)[0][0], run(layer, x)[0][0], rtol=0.05, atol=0.05)


def test_uninstalling_gives_torch_its_functions_back():
    with polycast.autocast("cpu", recipe=RECIPE):
        assert functional.grouped_mm.__module__ != "torch.nn.functional"
    polycast.uninstall()
    assert functional.grouped_mm.__module__ == "torch.nn.functional"
    assert "lstm" not in vars(torch._VF)


def test_an_lstm_of_float64_is_torchs(small_pays, run):
    layer, x = nn.LSTM(24, 16).eval().double(), torch.randn(3, 5, 24).double()
    with polycast.autocast("cpu"):
        expected = flat(layer(x))
    for ours, torchs in zip(flat(run(layer, x)[0]), expected, strict=True):
        assert ours.dtype is torchs.dtype
        assert torch.equal(ours, torchs)


def test_torchs_scripts_are_as_before_after_uninstalling():
    from torch.jit import _builtins

    polycast.uninstall()
    before = dict(_builtins._get_builtin_table())
    with polycast.autocast("cpu", recipe=RECIPE):
        assert _builtins._find_builtin(torch._VF.lstm) == "aten::lstm"
    polycast.uninstall()
    # By address: an entry that stays would be taken for another function.
    assert _builtins._get_builtin_table() == before


def test_an_lstm_trains_in_compiled_code_whose_recipe_computes_no_linears(fresh_dynamo):
    layer = nn.LSTM(4, 4)
    with torch.enable_grad():
        with polycast.autocast("cpu", recipe=polycast.Int8(ops=["mm"])):
            output = torch.compile(layer, backend="aot_eager")(torch.randn(3, 2, 4))[0]
        output.float().sum().backward()
    assert layer.weight_ih_l0.grad.isfinite().all()
