"""``tune`` of models that raise exceptions or return inf and nan."""

import math

import pytest
import torch
from tests.plugins.models import FLOAT16, Defined
from torch import nn

import polycast


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
def test_the_fastest_is_found_where_the_model_cannot_run_in_the_region(over):
    model = nn.Sequential(strict(ValueError("no float16 here")))
    tuned = polycast.tune(model, torch.randn(2, 4), **FLOAT16, over=over, objective="time")
    assert tuned.met
    assert tuned.evidence.trials[0].to_dict() == PLAIN_FAILED


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
    expected = (
        r"^float32's own output has 4 nan among its 4 elements, and no finite one: the output of a "
        r"region cannot be compared with it\. polycast\.observe\(\) names the op that makes the first of "
        r"them\.$"
    )
    model = masked(math.nan, all_of_them=True)
    with pytest.raises(ValueError, match=expected):
        polycast.tune(model, torch.randn(1, 4), **FLOAT16)
    with pytest.warns(UserWarning, match="has 4 nan among its 4 elements"):
        assert polycast.tune(model, torch.randn(1, 4), SOUND, **FLOAT16).met


def test_the_distance_is_infinite_where_an_attention_refuses_mixed_dtypes():
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if q.dtype != k.dtype:
            raise ValueError("q and k must have the same dtype")
        return torch.softmax(q @ k.T, -1)

    attention = Defined(forward, q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    torch.manual_seed(0)
    model = nn.Sequential(attention)
    with torch.no_grad():
        model[0].q.weight.mul_(1e6)
        model[0].k.weight.mul_(1e-6)
    tuned = polycast.tune(model, torch.randn(2, 4), **FLOAT16)
    assert {"0.q", "0.k"} <= set(tuned.evidence.members)
    assert {trial.error for trial in tuned.evidence.trials} == {"", "q and k must have the same dtype"}


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

    wraps = Defined(forward, layer=nn.Linear(4, 4))
    with torch.no_grad():
        model = nn.Sequential(wraps)
        model[0].layer.weight.mul_(1e6)
    assert polycast.tune(model, torch.randn(2, 4), **FLOAT16, over="ops").policy.ops.keys() == {"linear"}
