"""Unusual state of a model: shared and sparse buffers, dicts of other classes, and writes to the data of parameters."""

import collections
import copy
import pickle

import pytest
import torch
from tests.plugins.models import Defined

import polycast


class Normed(torch.nn.Linear):
    """A layer whose forward limits the norm of its weight."""

    def __init__(self, in_place):
        super().__init__(8, 8)
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            self.weight.data.mul_(0.5)
        else:
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (Normed(False), torch.randn(2, 8)),
        (Normed(True), torch.randn(2, 8)),
        (torch.nn.Embedding(4, 4, max_norm=0.1), torch.tensor([1, 2])),
    ],
    ids=["new data", "in place", "embedding"],
)
def test_writes_to_a_parameter_are_refused(layer, x):
    expected = r"writes to its parameter '0\.weight' \(as nn\.Embedding does with max_norm\)"
    with pytest.raises(RuntimeError, match=expected):
        polycast.compare(torch.nn.Sequential(layer), x)


@pytest.mark.filterwarnings("ignore:float32's own output has")
def test_parameters_with_nan_are_not_taken_for_written_ones():
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    assert polycast.compare(model, torch.ones(1, 4)).is_complete


def test_buffers_in_an_ordered_dict_are_restored():
    """As those of a model from an older torch."""
    model = torch.nn.BatchNorm1d(4)
    vars(model)["_buffers"] = collections.OrderedDict(model._buffers)
    before = model.running_mean.clone()
    polycast.compare(model, torch.randn(8, 4))
    assert torch.equal(model.running_mean, before)


def test_buffers_that_share_memory_do_so_in_each_run():
    def forward(self, x):
        self.keys.copy_(x[0])
        assert torch.equal(self.cache[0], self.keys)
        return self.layer(x) + self.cache.sum()

    cache = torch.zeros(2, 4)
    buffers = {"cache": torch.nn.Buffer(cache), "keys": torch.nn.Buffer(cache[0])}
    model, x = Defined(forward, layer=torch.nn.Linear(4, 4), **buffers), torch.ones(1, 4)
    found = polycast.compare(model, x)
    assert found.outputs["output"].relative < 0.1
    assert torch.equal(model.cache, torch.zeros(2, 4))
    assert torch.equal(model.keys, torch.zeros(4))


def test_sparse_buffers_are_cloned():
    model = torch.nn.Linear(4, 4)
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    assert polycast.compare(model, torch.ones(1, 4)).is_complete


def test_results_are_copied_and_pickled():
    model, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    compared = polycast.compare(model, x)
    evidence = polycast.tune(model, x, tolerance=1.0).evidence
    for copied in (copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))):
        assert copied(compared).outputs == compared.outputs
        assert str(copied(evidence)) == str(evidence)
        with pytest.raises(TypeError):
            copied(compared).outputs["output"] = None
