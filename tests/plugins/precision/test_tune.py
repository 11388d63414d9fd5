"""``tune`` finds planted culprits, and explains if there is no policy to be found."""

import json
import math

import pytest
import torch
from tests.plugins.models import FLOAT16, Defined, distance, scaled
from torch import nn

import polycast
from polycast_plugins.precision.calls import ModelCall
from polycast_plugins.precision.candidates import Blocks, ModuleCandidates
from polycast_plugins.precision.minimal_set import Choice
from polycast_plugins.precision.profiling_run import profile_runs


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


def test_two_layers_one_behind_the_other_that_overflow_only_together_are_found():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8)))
    with torch.no_grad():
        for n, factor in ((2, 1000.0), (3, 1000.0), (4, 1e-6)):
            model[n].weight.mul_(factor)
    members = tune(model, torch.randn(4, 8).clamp(-1, 1) * 30).evidence.members
    assert set(members) <= {"2", "3", "4"}
    assert "3" in members


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


def test_the_layers_of_bert_that_overflow_are_found():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, vocab_size=99)
    model = BertModel(config).eval()
    culprits = (model.encoder.layer[1].intermediate.dense, model.encoder.layer[3].output.dense)
    with torch.no_grad():
        for layer in culprits:
            layer.weight.mul_(2e6)
    names = {name for name, module in model.named_modules() if module in culprits}
    inputs = {"input_ids": torch.randint(99, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    tuned = tune(model, inputs)
    assert names <= set(tuned.evidence.members)
    assert tuned.evidence.plain == math.inf
    assert len(tuned.evidence.members) <= 8


def test_tune_is_deterministic():
    model, x = nn.Sequential(*(overflowing(8, n == 3) for n in range(6)), nn.Dropout()), torch.randn(4, 8)
    one, two = polycast.tune(model, x, **FLOAT16), polycast.tune(model, x, **FLOAT16)
    assert one == two
    assert one.policy.text() == two.policy.text()


def test_a_policy_and_its_evidence_can_be_unpacked():
    policy, evidence = polycast.tune(nn.Linear(4, 4), torch.randn(2, 4), **FLOAT16)
    assert policy.modules == {}
    assert evidence.members == ()
    assert evidence.met


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

    def metric(output, reference):
        error = (output - reference).norm()
        return 1.0 + error

    expected = "no policy keeps the tolerance: with all modules in float32 the distance is 1. The closest that was "
    with pytest.warns(UserWarning, match=expected):
        tuned = polycast.tune(model, x, metric, **FLOAT16)
    assert not tuned.met
    assert tuned.evidence.distance == min(trial.distance for trial in tuned.evidence.trials) == 1.0


def test_a_budget_is_kept():
    model, x = nn.Sequential(*(overflowing(8, n % 3 == 0) for n in range(12))), torch.randn(4, 8)
    tuned = polycast.tune(model, x, **FLOAT16, budget=6)
    assert tuned.met
    assert not tuned.evidence.is_minimal
    assert len(tuned.evidence.trials) == 6
    assert tuned.evidence.reason == "the budget was spent after 6 evaluations"


def test_a_model_that_cannot_run_in_float32_may_need_no_policy():
    assert tune(nn.Linear(4, 4).bfloat16(), torch.randn(2, 4).bfloat16()).policy.modules == {}


def test_a_model_that_calls_itself_can_be_tuned():
    again = Defined(
        lambda self, x, times=2: self(self.layer(x) * 1e6, times - 1).float() * 1e-6 if times else x,
        layer=nn.Linear(4, 4),
    )
    assert tune(again, torch.randn(2, 4)).evidence.distance <= 1e-2


def test_only_modules_with_parameters_have_rules_against_their_callers():
    model = Defined(
        lambda self, x: self.last(self.act(self.first(x)).float() @ torch.eye(4)),
        first=nn.Linear(4, 4),
        act=nn.ReLU(),
        last=nn.Linear(4, 4),
    )
    seen, _ = profile_runs(model, (ModelCall.of(model, torch.randn(2, 4)),), "cpu")
    assert ModuleCandidates(Blocks(model, seen), torch.float16).policy(Choice(("",))).modules == {
        "": "fp32",
        "first": "float16",
        "last": "float16",
    }
    assert ModuleCandidates(Blocks(model, seen), torch.float16).policy(Choice(("", "act", "last"))).modules == {
        "": "fp32",
        "first": "float16",
    }
    assert ModuleCandidates(Blocks(model, seen), torch.float16).policy(Choice(("act",))).modules == {"act": "fp32"}


def test_an_output_without_floating_point_needs_a_metric():
    labels = Defined(lambda self, x: x.argmax(-1))
    model, x = nn.Sequential(nn.Linear(4, 4), labels), torch.randn(5, 4)
    with pytest.raises(
        ValueError, match=r"^the model returned no floating-point tensor, but Tensor, .* Pass one: metric"
    ):
        polycast.tune(model, x, **FLOAT16)
    assert tune(model, x, lambda a, b: (a != b).float().mean(), tolerance=1.0).policy.modules == {}


def test_a_model_that_is_not_a_module_is_refused():
    with pytest.raises(TypeError, match=r"^model must be a torch\.nn\.Module, got function$"):
        polycast.tune(lambda x: x, torch.randn(5, 4), **FLOAT16)


def test_tune_restores_the_model():
    model, x = nn.Sequential(overflowing(4, True), nn.BatchNorm1d(4), nn.Dropout()), torch.randn(4, 4)
    before = [(name, id(t), t._version, t.tolist()) for name, t in model.state_dict(keep_vars=True).items()]
    state = torch.get_rng_state()
    tune(model, x)
    assert [(name, id(t), t._version, t.tolist()) for name, t in model.state_dict(keep_vars=True).items()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []
    assert [p.grad for p in model.parameters()] == [None] * 6


def test_a_saved_policy_has_its_evidence_as_comments(tmp_path):
    model = nn.Sequential(overflowing(8, True), nn.Linear(8, 8))
    tuned = tune(model, torch.randn(4, 8))
    tuned.save(tmp_path / "policy.toml")
    text = (tmp_path / "policy.toml").read_text()
    assert polycast.Policy.load(tmp_path / "policy.toml") == tuned.policy
    assert f"torch {torch.__version__}" in text
    assert "# relative L2 error" in text
    assert "float32 (4, 8)" in tuned.policy.name


def test_the_evidence_can_be_written_as_json():
    said = tune(nn.Sequential(overflowing(8, True)), torch.randn(4, 8)).evidence.to_dict()
    again = json.loads(json.dumps(said, allow_nan=False))
    assert again == said
    assert (again["schema"], again["dtype"], again["plain"]) == (1, "float16", "inf")
    assert again["trials"][0] == {"members": [], "distance": "inf"}


@pytest.mark.parametrize("over", ["modules", "ops"])
def test_inference_mode_changes_nothing(over):
    model, x = nn.Sequential(overflowing(4, True), nn.BatchNorm1d(4), nn.ReLU(inplace=True)), torch.randn(8, 4)
    expected = tune(model, x, over=over)
    with torch.inference_mode():
        assert tune(model, x, over=over) == expected
