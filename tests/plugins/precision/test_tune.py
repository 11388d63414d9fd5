"""``tune`` finds planted culprits, also where the model raises, and explains if there is no policy to be found."""

import json
import math

import pytest
import torch
from tests.plugins.models import FLOAT16, Defined, distance, scaled
from torch import nn

import polycast


def tune(model, inputs, metric=None, **arguments):
    """Tune, and check that the result keeps the tolerance and is minimal."""
    tuned = polycast.tune(model, inputs, metric, **{**FLOAT16, **arguments})
    evidence = tuned.evidence
    distances = {frozenset(trial.members): trial.distance for trial in evidence.trials}
    assert tuned.met
    assert evidence.is_minimal
    assert evidence.distance <= evidence.tolerance
    for name in evidence.members:
        assert distances[frozenset(evidence.members) - {name}] > evidence.tolerance
    return tuned


def overflowing(width, much):
    """Return two layers, if `much` with a value between them that overflows float16."""
    return scaled(1e6 if much else 1.0, width, bias=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("culprits", [(), (4,), (0, 7, 11)], ids=str)
def test_layers_that_overflow_are_found(culprits, seed, engine):
    torch.manual_seed(seed)
    model, x = nn.Sequential(*(overflowing(8, n in culprits) for n in range(12))), torch.randn(4, 8)
    tuned = tune(model, x)
    assert set(tuned.evidence.members) == {f"{n}.{part}" for n in culprits for part in ("up", "down")}
    assert distance(model, x, tuned.policy, dtype=torch.float16) == pytest.approx(tuned.evidence.distance)


@pytest.mark.parametrize("seed", range(3))
def test_two_layers_that_overflow_only_together_are_found(seed):
    torch.manual_seed(seed)

    both = Defined(lambda self, x: (self.a(x) + self.b(x)).float() / 80_000, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), both, nn.Linear(8, 8))
    for parameter, value in ((model[0].weight, 0), (model[0].bias, 1), (both.a.weight, 5000), (both.b.weight, 5000)):
        nn.init.constant_(parameter, value)  # each layer returns 40,000
    members = tune(model, torch.randn(4, 8)).evidence.members
    assert members in {("1.a",), ("1.b",)}  # a sum with a float32 one is in float32


@pytest.mark.parametrize("over", ["modules", "ops"])
def test_a_softmax_with_large_logits_is_found(over, engine):
    def forward(self, x):
        logits = (self.q(x) * self.scale) @ (self.k(x) * self.scale).transpose(-1, -2)
        return x + self.out(torch.softmax(logits / self.scale**2, -1) @ self.v(x))

    def attention(scale):
        return Defined(forward, **{name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")}, scale=scale)

    model = nn.Sequential(attention(1.0), attention(600.0), attention(1.0))
    tuned = tune(model, torch.randn(2, 5, 16), over=over)
    if over == "modules":
        assert tuned.policy.modules["1"] == "fp32"
        assert {name.partition(".")[0] for name in tuned.evidence.members} == {"1"}
    else:
        assert "matmul" in tuned.policy.ops


def test_a_layer_norm_over_a_large_sum_is_found():
    def norm(self, x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), Defined(norm))))
    with torch.no_grad():
        model[4].weight.mul_(1000.0)
    assert tune(model, torch.randn(4, 64)).policy.modules == {"5": "fp32"}


def test_tune_is_deterministic():
    model, x = nn.Sequential(*(overflowing(8, n == 3) for n in range(6)), nn.Dropout()), torch.randn(4, 8)
    one, two = polycast.tune(model, x, **FLOAT16), polycast.tune(model, x, **FLOAT16)
    assert one == two
    assert one.policy.text() == two.policy.text()


def test_the_metric_decides():
    model, x = nn.Sequential(overflowing(8, True), overflowing(8, True)), torch.randn(4, 8)
    seen = []

    def metric(output, reference):
        seen.append((output.dtype, reference.dtype, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return (output.float() - reference)[:, 0].abs().max()

    tuned = tune(model, x, metric, tolerance=0.05)
    assert {each[1:] for each in seen} == {(torch.float32, False, False)}
    assert "metric" in tuned.evidence.metric


@pytest.mark.parametrize("metric", [lambda a, b: math.nan, lambda a, b: torch.tensor(math.inf)], ids=["nan", "inf"])
def test_a_metric_that_is_not_finite_in_float32_is_warned_about(metric):
    with pytest.warns(UserWarning, match="the metric of float32's own output and itself is not finite"):
        tuned = polycast.tune(nn.Linear(4, 4), torch.randn(2, 4), metric, **FLOAT16)
    assert (tuned.met, tuned.evidence.distance) == (False, math.inf)
    assert "NOT within the tolerance" in str(tuned)


def test_the_closest_is_returned_if_no_policy_keeps_the_tolerance():
    model, x = nn.Sequential(overflowing(8, False), overflowing(8, True)), torch.randn(4, 8)
    expected = "no policy keeps the tolerance: with all modules in float32 the distance is 1. The closest that was "
    with pytest.warns(UserWarning, match=expected):
        tuned = polycast.tune(model, x, lambda output, reference: 1.0 + (output - reference).norm(), **FLOAT16)
    assert not tuned.met
    assert tuned.evidence.distance == min(trial.distance for trial in tuned.evidence.trials) == 1.0


def test_a_budget_is_kept():
    model, x = nn.Sequential(*(overflowing(8, n % 3 == 0) for n in range(12))), torch.randn(4, 8)
    evidence = polycast.tune(model, x, **FLOAT16, budget=6).evidence
    assert (evidence.met, evidence.is_minimal, len(evidence.trials)) == (True, False, 6)
    assert evidence.reason == "the budget was spent after 6 evaluations"


def test_a_model_that_cannot_run_in_float32_may_need_no_policy():
    assert tune(nn.Linear(4, 4).bfloat16(), torch.randn(2, 4).bfloat16()).policy.modules == {}


def test_a_model_that_calls_itself_can_be_tuned():
    again = Defined(
        lambda self, x, times=2: self(self.layer(x) * 1e6, times - 1).float() * 1e-6 if times else x,
        layer=nn.Linear(4, 4),
    )
    assert tune(again, torch.randn(2, 4)).evidence.distance <= 1e-2


def test_an_output_without_floating_point_needs_a_metric():
    labels = Defined(lambda self, x: x.argmax(-1))
    model, x = nn.Sequential(nn.Linear(4, 4), labels), torch.randn(5, 4)
    expected = r"^the model returned no floating-point tensor, but Tensor, .* Pass one: metric"
    with pytest.raises(ValueError, match=expected):
        polycast.tune(model, x, **FLOAT16)
    assert tune(model, x, lambda a, b: (a != b).float().mean(), tolerance=1.0).policy.modules == {}


def test_tune_restores_the_model():
    model, x = nn.Sequential(overflowing(4, True), nn.BatchNorm1d(4), nn.Dropout()), torch.randn(4, 4)

    def state():
        tensors = [(name, id(t), t._version, t.tolist()) for name, t in model.state_dict(keep_vars=True).items()]
        return tensors, torch.get_rng_state().tolist()

    before = state()
    tune(model, x)
    assert state() == before
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []
    assert [p.grad for p in model.parameters()] == [None] * 6


def test_a_saved_policy_has_its_evidence_as_comments(tmp_path):
    tuned = tune(nn.Sequential(overflowing(8, True), nn.Linear(8, 8)), torch.randn(4, 8))
    policy, evidence = tuned
    tuned.save(tmp_path / "policy.toml")
    text = (tmp_path / "policy.toml").read_text()
    assert polycast.Policy.load(tmp_path / "policy.toml") == policy
    assert f"torch {torch.__version__}" in text
    assert f"# {evidence.metric}" in text
    assert "# relative L2 error" in text
    assert "float32 (4, 8)" in policy.name


def test_the_evidence_can_be_written_as_json():
    said = tune(nn.Sequential(overflowing(8, True)), torch.randn(4, 8)).evidence.to_dict()
    again = json.loads(json.dumps(said, allow_nan=False))
    assert again == said
    assert (again["schema"], again["dtype"], again["plain"]) == (1, "float16", "inf")
    assert again["trials"][0] == {"members": [], "distance": "inf"}


def strict(error):
    """Return a model that raises an exception where its layer computes in float16."""

    def forward(self, x):
        y = self.layer(x)
        if y.dtype is torch.float16:
            raise error
        return y

    return Defined(forward, layer=nn.Linear(4, 4))


class OwnError(Exception):
    """One that torch knows nothing of."""


PLAIN_FAILED = {"members": [], "distance": "inf", "error": "no float16 here"}


@pytest.mark.parametrize("over", ["modules", "ops"])
@pytest.mark.parametrize("error", [RuntimeError, ValueError, AssertionError, IndexError, OwnError])
def test_the_distance_is_infinite_where_the_model_raises(error, over):
    model = nn.Sequential(strict(error("no float16 here\nat all")))
    tuned = polycast.tune(model, torch.randn(2, 4), **FLOAT16, over=over)
    assert tuned.evidence.members == (("0.layer",) if over == "modules" else ("linear",))
    assert tuned.evidence.trials[0].to_dict() == PLAIN_FAILED


@pytest.mark.slow
@pytest.mark.parametrize("over", ["modules", "ops"])
def test_the_fastest_is_found_by_a_race_where_the_model_cannot_run_in_the_region(over):
    model = nn.Sequential(strict(ValueError("no float16 here")))
    evidence = polycast.tune(model, torch.randn(2, 4), **FLOAT16, over=over, objective="time").evidence
    assert evidence.met
    assert evidence.trials[0].to_dict() == PLAIN_FAILED
    assert evidence.timings.chosen in evidence.timings.seconds
    assert all(0 < each < 1 for each in evidence.timings.seconds.values())


def masked(value, all_of_them=False):
    """Return a model that returns some values that are not finite."""

    def forward(self, x):
        y = self.layer(x)
        return torch.full_like(y, value) if all_of_them else torch.cat([y, torch.full_like(y[:1], value)])

    return Defined(forward, layer=nn.Linear(4, 4))


SOUND = lambda output, reference: 0.0  # noqa: E731


@pytest.mark.parametrize("metric", [None, SOUND], ids=["no metric", "metric"])
@pytest.mark.parametrize(("value", "text"), [(math.nan, "4 nan"), (-math.inf, "4 inf")], ids=["nan", "inf"])
def test_a_reference_that_is_not_finite_is_warned_about(metric, value, text):
    with pytest.warns(UserWarning, match=rf"^float32's own output has {text} among its 12 elements") as caught:
        tuned = polycast.tune(masked(value), torch.randn(2, 4), metric, **FLOAT16)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert tuned.met


def test_a_reference_without_a_finite_element_is_refused():
    model, x = masked(math.nan, all_of_them=True), torch.randn(1, 4)
    expected = (
        r"^float32's own output has 4 nan among its 4 elements, and no finite one: the output of a region cannot be "
        r"compared with it\. polycast\.observe\(\) names the op that makes the first of them\.$"
    )
    with pytest.raises(ValueError, match=expected):
        polycast.tune(model, x, **FLOAT16)
    with pytest.warns(UserWarning, match="has 4 nan among its 4 elements"):
        assert polycast.tune(model, x, SOUND, **FLOAT16).met


@pytest.mark.parametrize("when", ["always", "after the first call"])
def test_exceptions_that_do_not_depend_on_the_policy_are_raised(when):
    calls = []

    def forward(self, x):
        calls.append(x)
        if when == "always" or len(calls) > 1:
            raise ValueError("it is broken")
        return x

    with pytest.raises(ValueError, match=r"^it is broken$"):
        polycast.tune(nn.Sequential(nn.Linear(4, 4), Defined(forward)), torch.randn(2, 4), **FLOAT16)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError("full"), KeyboardInterrupt("full")])
def test_running_out_of_memory_and_interrupts_end_the_search(error):
    with pytest.raises(type(error), match="full"):
        polycast.tune(nn.Sequential(strict(error)), torch.randn(2, 4), **FLOAT16)


def test_a_banned_op_is_found_behind_another_exception():
    def forward(self, x):
        try:
            return self.layer(x)
        except RuntimeError as error:
            raise ValueError("the layer failed") from error

    model = Defined(forward, layer=nn.Linear(4, 4))
    with torch.no_grad():
        model.layer.weight.mul_(1e6)
    assert polycast.tune(model, torch.randn(2, 4), **FLOAT16, over="ops").policy.ops.keys() == {"linear"}
