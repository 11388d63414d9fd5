"""State files and searches: one belongs to searches with the same model, inputs, metric, arguments and versions."""

import os
import zlib

import pytest
import torch
from torch import nn

import polycast
from polycast.common import versions

SETTINGS = {"tolerance": 1e-2, "device_type": "cpu", "dtype": torch.float16}
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x, addend=0.0):
        return self.norm(self.layer(x)) + addend


class Other(Layer):
    def forward(self, x, addend=0.0):
        return self.norm(self.layer(x)) - addend


def power_metric(power):
    return lambda output, reference: (output - reference).norm() ** power


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
    refused(state, "model", Other(), differs=r"Differences: .*class .*Other")


def test_the_file_of_a_search_with_another_metric_is_refused(state):
    tuned(state, Layer(), X, power_metric(1))
    assert tuned(state, Layer(), X, power_metric(1)).met
    refused(state, "metric", Layer(), X, power_metric(2))


def test_the_file_of_a_search_with_another_argument_is_refused(state):
    tuned(state, Layer(), {"x": X, "addend": 1.0})
    refused(state, "inputs", Layer(), {"x": X, "addend": 2.0}, differs=r"Differences: argument 'addend'\.$")


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
