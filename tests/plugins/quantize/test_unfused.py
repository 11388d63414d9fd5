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


def flat(outputs):
    y, states = outputs
    return [y, *states]


def error(actual, expected):
    return (actual.float() - expected).norm() / expected.norm()


def linears(counts):
    return {(each.op, each.declined): each.calls for each in counts.records()}


LAYERS = {
    "one layer": {},
    "batch first": {"batch_first": True},
    "without biases": {"bias": False},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_an_lstm_is_computed_by_linears_in_the_recipe(small_pays, recipe_counts, options, states):
    layer = nn.LSTM(24, 16, **options).eval()
    x = torch.randn(3, 5, 24)
    count = layer.num_layers * (1 + layer.bidirectional)
    length, batch = (5, 3) if layer.batch_first else (3, 5)
    given = (torch.randn(count, batch, 16), torch.randn(count, batch, 16)) if states else None
    expected = flat(layer(x, given))
    with recipe_counts() as counts, polycast.autocast("cpu", recipe=RECIPE):
        actual = flat(layer(x, given))
    assert linears(counts) == {("aten::linear", ""): count * (1 + length)}
    for ours, torchs in zip(actual, expected, strict=True):
        assert (ours.dtype, ours.shape) == (torch.bfloat16, torchs.shape)
        assert error(ours, torchs) < 0.03


def test_an_lstm_without_batch_is_computed_by_the_recipe(small_pays, recipe_counts):
    layer, x = nn.LSTM(24, 16).eval(), torch.randn(3, 24)
    with recipe_counts() as counts, polycast.autocast("cpu", recipe=RECIPE):
        y, (hidden, _) = layer(x)
    assert linears(counts) == {("aten::linear", ""): 4}
    assert (y.shape, hidden.shape) == ((3, 16), (1, 16))


def test_one_step_is_computed_by_the_recipe_and_several_if_the_weights_are_large(recipe_counts):
    layer = nn.LSTM(24, 16).eval()
    for length, count in ((1, 2), (2, 0)):
        with recipe_counts() as counts, polycast.autocast("cpu", recipe=RECIPE):
            layer(torch.randn(length, 5, 24))
        assert sum(linears(counts).values()) == count


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_packed_sequences_and_projections_are_left_to_torch(small_pays):
    x = torch.randn(3, 2, 24)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
    for layer, given in ((nn.LSTM(24, 16), packed), (nn.LSTM(24, 16, proj_size=8), x)):
        with polycast.autocast("cpu"):
            expected = layer.eval()(given)[1][0]
        with polycast.autocast("cpu", recipe=RECIPE.with_options(ops=["mm"])):
            assert torch.equal(layer(given)[1][0], expected)
        with polycast.autocast("cpu", recipe=RECIPE):
            assert layer(given)[1][0].shape == expected.shape


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


def test_what_autograd_records_is_left_to_torch(small_pays, recipe_counts):
    layer = nn.LSTM(24, 16)
    rows, experts, ends = operands()
    with torch.enable_grad(), recipe_counts() as counts, polycast.autocast("cpu", recipe=RECIPE):
        layer(torch.randn(3, 5, 24))[0].float().sum().backward()
        products = functional.grouped_mm(rows, experts.requires_grad_(), offs=ends)
        (products * torch.randn(11, 32)).sum().backward()
    assert linears(counts).keys().isdisjoint({("aten::linear", ""), ("aten::mm", "")})
    assert layer.weight_hh_l0.grad is not None
    assert experts.grad is not None


def test_a_training_lstm_with_dropout_is_left_to_torch(small_pays, recipe_counts):
    layer = nn.LSTM(24, 16, num_layers=2, dropout=0.5)
    with recipe_counts() as counts, polycast.autocast("cpu", recipe=RECIPE):
        layer(torch.randn(3, 5, 24))
    assert not counts.records()


def operands(count=4, rows=11):
    """Return rows, experts [count, 16, 32] as a transposed view, and the ends of the rows of each expert."""
    weights = nn.Parameter(torch.randn(count, 32, 16), requires_grad=False)
    return torch.randn(rows, 16), weights.transpose(1, 2), torch.tensor([3, 3, 10, 11][:count], dtype=torch.int32)


def test_experts_with_rows_are_computed_by_the_recipe_one_by_one(engine, recipe_counts):
    rows, experts, ends = operands()
    expected = functional.grouped_mm(rows, experts, offs=ends)
    with recipe_counts() as counts, polycast.autocast("cpu", recipe=RECIPE):
        actual = functional.grouped_mm(rows, experts, offs=ends)
        alone = rows[3:10] @ experts[2]
    computed = {(op, not declined): calls for (op, declined), calls in linears(counts).items()}
    assert computed == {("aten::mm", True): 3, ("aten::matmul", True): 1}
    assert actual.dtype is torch.bfloat16
    assert error(actual, expected) < 0.03
    assert torch.equal(actual[3:10], alone)


def test_rows_after_the_last_end_are_zero():
    rows, experts, ends = operands(count=3, rows=14)
    with polycast.autocast("cpu", recipe=RECIPE):
        actual = functional.grouped_mm(rows, experts, offs=ends)
    assert actual.shape == (14, 32)
    assert actual[9].any()
    assert not actual[10:].any()


def test_wrong_sizes_have_torchs_error():
    rows, experts, ends = operands()
    with polycast.autocast("cpu", recipe=RECIPE), pytest.raises(RuntimeError):
        functional.grouped_mm(rows[:, :8], experts, offs=ends)


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


def test_a_compiled_lstm_is_computed_as_without_compiling(small_pays, fresh_dynamo):
    layer, x = nn.LSTM(24, 16).eval(), torch.randn(3, 5, 24)
    compiled = torch.compile(lambda x: layer(x), backend="eager")
    for _ in range(2):
        with polycast.autocast("cpu", recipe=RECIPE):
            torch.testing.assert_close(compiled(x)[0], layer(x)[0], rtol=0.05, atol=0.05)


def test_uninstalling_gives_torch_its_functions_back():
    with polycast.autocast("cpu", recipe=RECIPE):
        assert functional.grouped_mm.__module__ != "torch.nn.functional"
    polycast.uninstall()
    assert functional.grouped_mm.__module__ == "torch.nn.functional"
    assert "lstm" not in vars(torch._VF)


def test_an_lstm_of_float64_is_torchs(small_pays):
    layer, x = nn.LSTM(24, 16).eval().double(), torch.randn(3, 5, 24).double()
    with polycast.autocast("cpu"):
        expected = flat(layer(x))
    with polycast.autocast("cpu", recipe=RECIPE):
        actual = flat(layer(x))
    assert [each.dtype for each in actual] == [each.dtype for each in expected]
    assert all(map(torch.equal, actual, expected))


def test_torchs_scripts_are_as_before_after_uninstalling():
    from torch.jit import _builtins

    polycast.uninstall()
    before = dict(_builtins._get_builtin_table())
    with polycast.autocast("cpu", recipe=RECIPE):
        assert _builtins._find_builtin(torch._VF.lstm) == "aten::lstm"
    polycast.uninstall()
    assert (
        _builtins._get_builtin_table() == before
    )  # by address: an entry that stays would be taken for another function


def test_an_lstm_trains_in_compiled_code_whose_recipe_computes_no_linears(fresh_dynamo):
    layer = nn.LSTM(4, 4)
    with torch.enable_grad():
        with polycast.autocast("cpu", recipe=polycast.Int8(ops=["mm"])):
            output = torch.compile(layer, backend="aot_eager")(torch.randn(3, 2, 4))[0]
        output.float().sum().backward()
    assert layer.weight_ih_l0.grad.isfinite().all()
