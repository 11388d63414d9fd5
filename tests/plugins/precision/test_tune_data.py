"""``tune`` over batches: the distance over them, the candidates, and batches that are only measured."""

import json
import math

import pytest
import torch
from tests.plugins.models import FLOAT16, Defined, scaled
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polycast


@pytest.fixture
def model():
    """A model whose third block overflows for inputs of about 1, and its fifth for inputs of about 100."""
    torch.manual_seed(0)
    return nn.Sequential(*(scaled({2: 1e6, 4: 2e4}.get(n, 1.0)) for n in range(6)))


def usual():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)


def large():
    return usual() * 100


BOTH = {"2.up", "2.down", "4.up", "4.down"}


@pytest.mark.parametrize(
    "data",
    [
        lambda: [usual(), large()],
        lambda: (batch for batch in (usual(), large())),
        lambda: [(usual(),), [large()]],
        lambda: DataLoader(TensorDataset(torch.cat((usual(), large()))), batch_size=4),
    ],
    ids=["list", "generator", "tuples", "DataLoader"],
)
def test_a_policy_holds_for_the_worst_batch(model, data):
    assert set(polycast.tune(model, usual(), **FLOAT16).evidence.members) == {"2.up", "2.down"}
    tuned = polycast.tune(model, data(), **FLOAT16)
    assert set(tuned.evidence.members) == BOTH
    assert (tuned.met, tuned.evidence.batches) == (True, 2)
    assert "worst of 2 batches" in str(tuned.evidence)
    assert "and 1 more batch" in tuned.evidence.inputs


def test_each_trial_has_the_distance_of_each_batch(model):
    evidence = polycast.tune(model, [usual(), large()], **FLOAT16).evidence
    for trial in evidence.trials:
        assert len(trial.distances) == 2
        assert trial.distance == max(trial.distances)
    only_first = next(each for each in evidence.trials if each.distances[0] < 1e-2 < each.distances[1])
    assert only_first.distances[1] == math.inf
    json.dumps(evidence.to_dict(), allow_nan=False)


def test_the_mean_over_batches_can_be_the_distance(model):
    def found(**reduction):
        batches = [usual(), usual(), usual(), large()]
        settings = {**FLOAT16, "tolerance": 0.3, **reduction}
        return polycast.tune(model, batches, lambda output, _: float(not output.isfinite().all()), **settings).evidence

    mean = found(reduction="mean")
    assert set(mean.members) <= {"2.up", "2.down"}
    assert (mean.met, mean.distance) == (True, 0.25)
    assert "mean of 4 batches" in str(mean)
    assert {name.partition(".")[0] for name in found().members} == {"2", "4"}


def test_each_batch_sees_the_state_of_the_model_that_the_first_one_sees():
    seen = []

    def forward(self, x):
        self.count += 1
        seen.append((self.count.item(), torch.rand(()).item()))
        return x

    counts = Defined(forward, count=nn.Buffer(torch.zeros(())))
    polycast.tune(nn.Sequential(nn.Linear(8, 8), counts), [usual(), large(), usual()], **FLOAT16)
    assert len(set(seen)) == 1


def test_modules_that_only_one_batch_calls_are_candidates():
    chooses = Defined(
        lambda self, x: self.small(x) if x.abs().max() <= 1 else self.large(x), small=scaled(1.0), large=scaled(1e6)
    )
    torch.manual_seed(0)
    evidence = polycast.tune(chooses, [usual(), large()], **FLOAT16).evidence
    assert set(evidence.members) == {"large.up", "large.down"}
    assert evidence.candidates == 7


def test_a_margin_aims_below_the_tolerance(model):
    def found(tolerance, **margin):
        return polycast.tune(model[:2], usual(), **{**FLOAT16, "tolerance": tolerance}, **margin).evidence

    tolerance = found(1.0).plain * 1.05
    assert found(tolerance).members == ()
    evidence = found(tolerance, margin=0.2)
    assert evidence.met
    assert evidence.members
    assert evidence.distance <= 0.8 * tolerance
    assert "(margin 0.2)" in str(evidence)


def test_without_a_policy_that_keeps_the_margin_the_tolerance_decides(model):
    def never_small(output, reference):
        return 0.9 if output.isfinite().all() else 5.0

    evidence = polycast.tune(model, usual(), never_small, **{**FLOAT16, "tolerance": 1.0}, margin=0.5).evidence
    assert (evidence.met, evidence.reason) == (True, "no policy keeps the margin")
    assert {name.partition(".")[0] for name in evidence.members} == {"2"}


@pytest.mark.parametrize("exclude", ["0", ["0"], ["0.*", "0"]], ids=str)
def test_excluded_modules_stay_in_float32(model, exclude):
    tuned = polycast.tune(model, usual(), **FLOAT16, exclude=exclude)
    assert tuned.evidence.excluded == ("0", "0.down", "0.up")
    assert set(tuned.evidence.members) == {"2.up", "2.down"}
    assert tuned.policy.modules == {"0": "fp32", "2.up": "fp32", "2.down": "fp32"}
    assert tuned.evidence.candidates == 16
    assert "3 excluded" in str(tuned.evidence)


def test_excluded_modules_keep_the_rules_of_a_mapping(model):
    rules = {"0.**": "off", "3": "bfloat16", "[3-4].up": {"linear": "fp32"}, "5": {"output": "float32"}}
    tuned = polycast.tune(model, usual(), **FLOAT16, exclude=rules)
    assert tuned.evidence.excluded == ("0", "0.down", "0.up", "3", "3.down", "3.up", "4.up", "5")
    assert set(tuned.evidence.members) == {"2.up", "2.down"}
    kept = {"0": "off", "3": "bfloat16", "3.up": {"linear": "fp32"}, "4.up": {"linear": "fp32"}}
    kept |= {"5": {"output": "float32"}}
    assert dict(tuned.policy.modules) == {**polycast.Policy(modules=kept).modules, "2.up": "fp32", "2.down": "fp32"}
    assert polycast.Policy.of_text(tuned.text()) == tuned.policy


def test_blocks_are_chosen_as_one(model):
    tuned = polycast.tune(model, [usual(), large()], **FLOAT16, candidates=["[0-5]"])
    assert tuned.policy.modules == {"2": "fp32", "4": "fp32"}
    assert (set(tuned.evidence.members), tuned.evidence.candidates) == ({"2", "4"}, 6)
    with torch.no_grad(), polycast.apply_policy(model, tuned.policy), polycast.autocast("cpu", torch.float16):
        assert model(large()).isfinite().all()


def test_a_module_belongs_to_the_innermost_candidate(model):
    tuned = polycast.tune(model, usual(), **FLOAT16, candidates=["", "2.up"])
    assert tuned.evidence.candidates == 2
    assert set(tuned.evidence.members) == {"", "2.up"}
    assert tuned.policy.modules == {"": "fp32"}


def test_modules_that_are_no_candidates_are_never_in_float32(model):
    with pytest.warns(UserWarning, match="with all candidates in float32 the distance is inf"):
        tuned = polycast.tune(model, usual(), **FLOAT16, candidates=["[0-1]"])
    assert not tuned.met


def test_excluded_and_chosen_ops():
    attention = Defined(lambda self, x: torch.softmax((x * 300) @ (x * 300).T, -1) @ x)
    model = nn.Sequential(nn.Linear(8, 8), attention)

    def found(**chosen):
        return polycast.tune(model, usual(), **FLOAT16, over="ops", **chosen)

    policy, evidence = found(exclude=["lin*"])
    assert (evidence.excluded, evidence.members) == (("linear",), ("matmul",))
    assert set(policy.ops) == {"linear", "matmul"}
    kept = found(exclude={"lin*": "passthrough"}).policy.ops
    assert kept == polycast.Policy({"linear": "passthrough", "matmul": "fp32"}).ops
    evidence = found(candidates=iter(["matmul"])).evidence
    assert (evidence.candidates, evidence.members) == (1, ("matmul",))


def test_batches_held_out_are_only_measured(model):
    with pytest.warns(UserWarning, match=r"not on the batches held out: their distance is inf\. Search over data like"):
        tuned = polycast.tune(model, usual(), **FLOAT16, holdout=[usual() * 0.5, large()])
    held_out = tuned.evidence.holdout
    assert set(tuned.evidence.members) == {"2.up", "2.down"}
    assert (tuned.met, held_out.met, held_out.distance, held_out.plain) == (True, False, math.inf, math.inf)
    assert held_out.distances[0] < 1e-2
    assert "held out, inputs float32 (4, 8) and 1 more batch: inf, NOT within the tolerance" in str(tuned.evidence)
    assert tuned.evidence.to_dict()["holdout"]["distance"] == "inf"
    tuned = polycast.tune(model, [usual(), large()], **FLOAT16, holdout=usual() * 0.5)
    assert tuned.evidence.holdout.met


def gradients(outcome, reference):
    """The largest relative error of the gradient of a parameter."""
    both = ((outcome.gradients[name], expected) for name, expected in reference.gradients.items())
    return max((float((got - expected).norm() / expected.norm()) for got, expected in both), default=0.0)


@pytest.mark.parametrize("metric", [None, gradients], ids=["default", "of the user"])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_metric_may_use_gradients(metric, batches):
    """The gradients of the second layer underflow in float16, although its output is exact."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    data = [usual(), usual().flip(0)][:batches]
    without = polycast.tune(model, data, **FLOAT16)
    assert without.evidence.members == ()
    tuned = polycast.tune(model, data, metric, **FLOAT16, loss=lambda output: output.float().mean() * 1e-7)
    assert tuned.met
    assert tuned.evidence.plain == pytest.approx(1.0)
    assert tuned.evidence.members
    assert {parameter.grad for parameter in model.parameters()} == {None}


def test_metrics_of_outcomes_get_outputs_without_history(model):
    seen = []

    def metric(outcome, reference):
        seen.append((outcome.output.requires_grad, outcome.loss.requires_grad, sorted(outcome.gradients)[:2]))
        return 0.0

    model[0].requires_grad_(False)
    polycast.tune(model, usual(), metric, **FLOAT16, loss=lambda output: output.float().mean())
    assert set(map(str, seen)) == {"(False, False, ['1.down.weight', '1.up.weight'])"}


BATCHES = "batch 1 of data has another structure than batch 0: argument "
ONE = torch.ones(1, 8)
INVALID = [
    ({"model": lambda x: x}, r"model must be a torch\.nn\.Module, got function$"),
    ({"data": []}, "data has no batches: pass one call's inputs, or an iterable with at least one batch"),
    ({"data": [ONE, 3]}, "batch 1 of data: inputs must be a tensor, a tuple"),
    ({"holdout": iter(())}, "holdout has no batches"),
    ({"holdout": usual().double()}, r"holdout has another structure than data: argument \[0\] is float64, and "),
    ({"data": [(ONE, torch.ones(1))]}, r"Sequential.forward\(input\) does not take these inputs, "),
    ({"data": [ONE, (ONE, torch.ones(1))]}, BATCHES),
    ({"data": [ONE, ONE.double()]}, rf"{BATCHES}\[0\] is float64, and float32 in batch 0\."),
    ({"data": [{"input": ONE}, ONE]}, "batch 1 of data has another structure"),
    ({"reduction": "max"}, "reduction must be 'worst' or 'mean', got 'max'"),
    ({"margin": 1}, "margin must be a share of the tolerance, at least 0 and below 1; got 1"),
    ({"margin": math.nan}, "margin must be a share of the tolerance, at least 0 and below 1; got nan"),
    ({"exclude": ["layers.*"]}, r"exclude\['layers\.\*'\] matches no module of the model"),
    ({"candidates": ["7"]}, r"candidates\['7'\] matches no module of the model"),
    ({"exclude": [""]}, r"there is nothing to choose from: exclude= matches all candidates\."),
    ({"candidates": []}, r"there is nothing to choose from: candidates= is empty\."),
    ({"exclude": {"0": {"output": "int8"}}}, r"exclude\['0'\]: 'output' must be a floating-point dtype"),
    ({"exclude": [3]}, "exclude must be a list of globs"),
    ({"exclude": 3}, "exclude must be a list of globs"),
    ({"over": "ops", "exclude": ["softmax"]}, r"exclude\['softmax'\] matches no op that the model calls; it calls "),
    ({"metric": lambda a, b: a}, "metric must return a number, the distance of the output from the reference"),
    ({"tolerance": -1}, "tolerance must be a number that is not negative, got -1"),
    ({"tolerance": math.nan}, "tolerance must be a number that is not negative, got nan"),
    ({"over": "layers"}, "over must be 'modules' or 'ops', got 'layers'"),
    ({"objective": "speed"}, "objective must be 'accuracy' or 'time', got 'speed'"),
    ({"budget": 1}, "budget must be a number of evaluations, at least 2"),
    ({"metric": 3}, "metric must be a function of an output and a reference, or None; got 3"),
    ({"metric": lambda a, b: "far"}, "metric must return a number, the distance of the output from the reference"),
]


def test_invalid_arguments_are_refused(model, subtests):
    for arguments, problem in INVALID:
        refusal = pytest.raises((TypeError, ValueError), match=f"^{problem}")
        with subtests.test(problem=problem), refusal:
            polycast.tune(**{"model": model, "data": usual(), **FLOAT16, **arguments})


def test_the_fastest_precision_is_found_for_blocks_over_batches(model, quick):
    quick("all in float32")
    arguments = {**FLOAT16, "objective": "time"}
    tuned = polycast.tune(model, [usual(), large()], **arguments, candidates=["[0-5]"], exclude=["0"])
    assert tuned.evidence.timings.chosen == "all in float32"
    assert tuned.policy.modules == {f"{n}": "fp32" for n in range(6)}
    assert tuned.evidence.timings.seconds["all in float32"] == 0.5  # of one call of two
