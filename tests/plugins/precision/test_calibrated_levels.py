"""``polycast.calibrate`` for `Int4`: levels that compensate rounding errors, and when they are used."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn

import polycast
from polycast import Calibration, Int4, Int8
from polycast_plugins.quantize import products
from polycast_plugins.quantize.cpu.int4_levels import Int4Levels

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), Int4())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int4 here: {AVAILABLE.reason}")

RECIPE = Int4(min_size=0)


def attention():
    """Return a model with queries, keys and values of the same activations, and a layer of others."""
    layers = {name: nn.Linear(128, 64 if name == "out" else 96) for name in ("q", "k", "v", "out")}
    return Defined(lambda self, x: self.out(torch.cat((self.q(x) + self.k(x) * self.v(x), x[..., :32]), -1)), **layers)


def correlated(rows):
    """Return activations of which some go together, as those of language models do: rounding errors can cancel out."""
    generator = torch.Generator().manual_seed(rows)
    mixing = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    return torch.randn(rows, 16, generator=generator) @ mixing + 0.3 * torch.randn(rows, 128, generator=generator)


@pytest.fixture
def model():
    return attention().eval()


@pytest.fixture
def calibration(model):
    return polycast.calibrate(model, [correlated(400), correlated(300)], RECIPE)


def run(model, x, calibration=None, recipe=RECIPE):
    with torch.no_grad(), polycast.autocast("cpu", recipe=recipe.with_options(calibration=calibration)):
        return model(x).float()


def error(model, x, calibration=None, recipe=RECIPE):
    exact = model(x)
    return ((run(model, x, calibration, recipe) - exact).norm() / exact.norm()).item()


def reason(model, calibration, recipe=RECIPE):
    with torch.no_grad(), polycast.autocast("cpu"):
        arguments = torch.randn(1, 128), model.q.weight, model.q.bias
        recipe = recipe.with_options(calibration=calibration)
        return polycast.explain("linear", *arguments, device_type="cpu", recipe=recipe).reason


def test_errors_fall_on_other_data_in_each_group_size(model, subtests):
    other = correlated(200)
    for group_size in (32, 64, 128):
        recipe = Int4(group_size, min_size=0)
        calibration = polycast.calibrate(model, [correlated(700)], recipe)
        with subtests.test(group_size=group_size):
            assert error(model, other, calibration, recipe) < 0.75 * error(model, other, None, recipe)
            assert reason(model, calibration, recipe).endswith("rounding errors compensated")


def test_levels_are_those_of_the_definition(model):
    """Round the columns one by one, in float64, by the inverse of what is left of the moments."""
    x = correlated(400)
    (found,) = (each for each in polycast.calibrate(model, [x], RECIPE).weights if each.name == "q.weight")
    weight, moments = model.q.weight.detach().double(), x.double().t() @ x.double()
    if found.factors is not None:
        weight, moments = weight * found.factors, moments / found.factors / found.factors[:, None]
    moments.diagonal().add_(0.01 * moments.diagonal().mean())
    halves, multipliers, scales = found.levels
    levels = torch.stack((halves & 15, halves >> 4), -1).flatten(1).double() - 8
    steps = multipliers.double().repeat_interleave(32, 1) * scales.double()
    for k in range(128):
        expected = (weight[:, k] / steps[:, k]).round().clamp(-8, 7)
        ties = ((weight[:, k] / steps[:, k]).frac().abs() - 0.5).abs() < 1e-3
        assert torch.equal(levels[:, k][~ties], expected[~ties]), k
        inverse = torch.linalg.inv(moments[k:, k:])
        rest = weight[:, k] - levels[:, k] * steps[:, k]
        weight[:, k:] -= rest[:, None] / inverse[0, 0] * inverse[0]


def test_levels_reach_the_highest_and_terms_that_grew_beyond_the_scale():
    levels, columns = Int4Levels(2, 64, 32, torch.device("cpu")), torch.zeros(64, 2)
    columns[0], columns[1], columns[32] = 105, torch.tensor([-90.0, -105.0]), 120  # which the scale is made for
    rounded = [levels.round_column(k, columns[k:]) for k in range(32)]
    assert torch.equal(torch.stack(rounded), columns[:32])
    columns[32] = 300
    assert levels.round_column(32, columns[32:]).tolist() == [120, 120]


def test_a_changed_weight_is_computed_without_levels(model, calibration):
    x, changed = correlated(5), copy.deepcopy(model)
    with torch.no_grad():
        changed.q.weight[77, 3] += 1
    assert torch.equal(run(copy.deepcopy(model), x, calibration), run(model, x, calibration))
    assert reason(changed, calibration).startswith("not calibrated")
    with torch.no_grad():
        model.q.weight[77, 3] += 1
    assert torch.equal(run(model, x, calibration), run(changed, x, calibration))


def test_a_saved_calibration_has_the_same_levels_and_a_later_checkpoint_gets_none(model, calibration, tmp_path):
    x = correlated(5)
    calibration.save(tmp_path / "c")
    assert torch.equal(run(model, x, Calibration.load(tmp_path / "c")), run(model, x, calibration))
    assert Calibration.load(tmp_path / "c", copy.deepcopy(model)) == calibration
    with torch.no_grad():
        model.q.weight.mul_(1.01)
    later = Calibration.load(tmp_path / "c", model)
    kept = [each.name for each in later.weights if each.levels]
    assert kept == [each.name for each in calibration.weights if each.levels and each.name != "q.weight"]
    assert "compensated" not in reason(model, later)


def test_levels_of_another_group_size_are_not_used(model, calibration):
    x, other = correlated(5), "its levels are of another format, int4, groups of 32"
    without = Calibration(tuple(replace(each, levels=()) for each in calibration.weights))
    for recipe in (Int4(64, min_size=0), Int8(min_size=0)):
        assert reason(model, calibration, recipe).endswith(other)
        assert torch.equal(run(model, x, calibration, recipe), run(model, x, without, recipe))


def test_little_memory_for_moments_takes_more_passes_and_gives_the_same(model, calibration, monkeypatch, tmp_path):
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    batches = [correlated(400), correlated(300)]
    assert polycast.calibrate(model, batches, RECIPE) == calibration
    assert len(passes) == 2 * 2
    monkeypatch.setattr(products, "_MOMENTS_BYTES", 1)
    passes.clear()
    assert polycast.calibrate(model, iter(batches), RECIPE, tmp_path / "c") == calibration
    assert len(passes) == 2 * 3  # queries, keys and values share their moments
    assert Calibration.load(tmp_path / "c") == calibration


def test_an_interrupted_run_goes_on_and_a_file_of_another_model_is_kept(model, calibration, tmp_path, logged):
    batches, path = [correlated(400), correlated(300)], tmp_path / "c"
    replace(calibration, weights=calibration.weights[:2]).save(path)
    assert polycast.calibrate(model, batches, RECIPE, path) == calibration
    said = [text for _, text in logged.take() if text.startswith("calibrated")]
    assert said == ["calibrated 1 of 2 weights", "calibrated 2 of 2 weights"]
    with pytest.raises(ValueError, match="is the calibration of other weights: give the path of a new file"):
        polycast.calibrate(attention(), batches, RECIPE, path)
    assert Calibration.load(path) == calibration


def test_a_file_for_another_recipe_is_refused_and_kept(model, calibration, tmp_path):
    path = tmp_path / "c"
    calibration.save(path)
    text = "is the calibration for int4(group_size=32, calibration=None), not for "
    for recipe in (Int4(64), Int8()):
        with pytest.raises(ValueError, match=re.escape(f"{text}{recipe.format}: give the path of a new file")):
            polycast.calibrate(model, [correlated(300)], recipe.with_options(min_size=0), path)
    assert Calibration.load(path) == calibration


def test_a_weight_named_like_the_levels_of_another_keeps_its_factors(model, tmp_path):
    weight = model.q.weight.detach()
    weights = {"q": nn.Parameter(weight)} | {n: nn.Parameter(weight * torch.rand(128)) for n in ("q:0", "q:1", "0:q")}
    named = Defined(lambda self, x: torch.stack([x @ weight.t() for weight in self.parameters()]), **weights)
    x = correlated(400) * torch.rand(128) ** 4 * 50
    calibration = polycast.calibrate(named, [x], RECIPE, tmp_path / "c")
    found = {each.name: (each.factors is not None, len(each.levels)) for each in calibration.weights}
    assert found == dict.fromkeys(("q", "q:0", "q:1", "0:q"), (True, 3))
    assert Calibration.load(tmp_path / "c") == calibration


def test_activations_that_are_written_over_count_each_time(model):
    def in_place(self, x):
        x = x.clone()
        return self.q(x) + self.k(x.copy_(x.flip(-1)))

    def calibrated(forward):
        return polycast.calibrate(Defined(forward, q=model.q, k=model.k), [correlated(400)], RECIPE)

    assert calibrated(in_place) == calibrated(lambda self, x: self.q(x) + self.k(x.flip(-1)))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_rows_with_inf_or_nan_do_not_count(model, value):
    x = correlated(400)
    broken = torch.cat((x, torch.full((1, 128), value)))
    found, expected = (polycast.calibrate(nn.Sequential(model.q), [each], RECIPE) for each in (broken, x))
    assert torch.equal(found.weights[0].levels[0], expected.weights[0].levels[0])


def test_a_weight_whose_activations_have_squares_that_overflow_gets_no_levels(model):
    layers = nn.ModuleList([model.q, model.k])
    layers.forward = lambda x: (layers[0](x), layers[1](x * 1e20))
    found = polycast.calibrate(layers, [correlated(400)], RECIPE)
    assert [bool(each.levels) for each in found.weights] == [True, False]


def test_channels_that_are_always_zero_and_too_few_rows_do_no_harm(model):
    x = correlated(3)
    x[:, 5] = 0
    (found,) = polycast.calibrate(nn.Sequential(model.q), [x], RECIPE).weights
    assert found.error <= found.plain_error
    assert error(nn.Sequential(model.q), correlated(200), polycast.Calibration((found,))) < 0.3
