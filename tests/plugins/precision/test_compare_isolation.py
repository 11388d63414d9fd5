"""``compare`` has no side effects, whatever a model's forward does and however it ends."""

import collections
import copy
import pickle
import random
import threading
import types

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn

import polycast


def everything(model):
    """Return the tensors of a model with their values and versions, its attributes, and the numbers of its hooks."""
    tensors = [*model.state_dict(keep_vars=True).items()]
    dicts = [(name, dict(vars(module)), dict(module._buffers)) for name, module in model.named_modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return [(name, id(t), t._version, t.tolist()) for name, t in tensors], str(dicts), hooks


def counting():
    """Return a model that depends on earlier calls: on a buffer that it writes, one that it replaces, attributes."""

    def forward(self, x):
        self.calls += 1
        self.written += 1
        self.replaced = self.replaced + 1
        self.last = x
        return self.layer(x) + self.written + self.replaced + self.calls

    buffers = {name: nn.Buffer(torch.zeros(4)) for name in ("written", "replaced")}
    return Defined(forward, layer=nn.Linear(4, 4), **buffers, calls=0)


MODELS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "attributes": lambda: nn.Sequential(counting(), counting()),
    "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)),
    "dropout": lambda: nn.Sequential(nn.Dropout(), nn.Linear(4, 4), nn.Dropout()),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_each_run_sees_the_same_state_and_random_numbers_and_they_are_restored(make):
    model, x = make(), torch.randn(3, 4, requires_grad=True)
    model(x.clone()).sum().backward()

    def state():
        gradients = [(id(p.grad), p.grad.tolist()) for p in model.parameters() if p.grad is not None]
        generators = torch.get_rng_state().tolist(), random.getstate()
        return everything(model), gradients, (x._version, x.tolist()), generators

    before = state()
    policy = {"linear": "fp32"}  # so that casts cause no error
    comparison = polycast.compare(model, (x,), device_type="cpu", policy=policy)
    assert {(module.own.relative, module.total.relative) for module in comparison.modules} == {(0.0, 0.0)}
    assert state() == before


class OnSecond(torch.Tensor):
    """A tensor that says to be on the second of two devices."""

    device = torch.device("xpu", 1)


@pytest.mark.parametrize(
    ("run", "what"), [("compare", "parameter"), ("compare", "input"), ("tune", "buffer"), ("calibrate", "buffer")]
)
def test_runs_draw_the_same_numbers_on_every_device_of_a_model_and_restore_its_generators(run, what, monkeypatch):
    states = [torch.ones(1), torch.ones(1)]
    index = lambda device: torch.device(device).index or 0  # noqa: E731
    fake = types.SimpleNamespace(
        device_count=lambda: 2,
        get_rng_state=lambda device="xpu": states[index(device)],
        set_rng_state=lambda state, device="xpu": states.__setitem__(index(device), state),
    )
    monkeypatch.setattr(torch, "xpu", fake)

    def draw(self, x, on_second):
        states[1] = states[1] + 1
        return self.layer(x) * states[1]

    model, on_second = Defined(draw, layer=nn.Linear(4, 4)), torch.ones(1).as_subclass(OnSecond)
    if what == "parameter":
        model.held = nn.Parameter(on_second)
    if what == "buffer":
        model.register_buffer("held", on_second)
    args = torch.randn(3, 4), on_second if what == "input" else None
    if run == "compare":
        compared = polycast.compare(model, args, device_type="cpu", policy={"linear": "fp32"})
        assert {module.total.relative for module in compared.modules} == {0.0}
    elif run == "tune":
        assert polycast.tune(model, args, tolerance=1e-2, device_type="cpu").evidence.met
    else:
        with pytest.raises(ValueError, match="computes no product"):
            polycast.calibrate(model, [args], "int8")
    assert states == [1, 1]


@pytest.mark.parametrize("where", ["float32", "the region", "the repeated call"])
def test_an_exception_restores_the_model(where):
    def forward(self, x):
        y = self.layer(x)
        is_worker = threading.current_thread() is not threading.main_thread()
        repeated = not is_worker and torch.is_autocast_enabled("cpu")
        if {"float32": not torch.is_autocast_enabled("cpu"), "the region": is_worker}.get(where, repeated):
            raise ZeroDivisionError(where)
        return self.inner(y)

    fails = Defined(forward, layer=nn.Linear(4, 4), inner=nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), fails, nn.BatchNorm1d(4))
    before = everything(model)
    with pytest.raises(ZeroDivisionError, match=where):
        polycast.compare(model, torch.randn(3, 4), device_type="cpu")
    assert everything(model) == before
    assert "polycast.compare" not in {thread.name for thread in threading.enumerate()}
    assert not torch.is_autocast_enabled("cpu")


def test_only_one_output_of_a_module_is_kept(alive):
    """Besides the values of the two runs, which are the input and the output of one layer each in a chain."""
    tensors, counts = alive

    class Noted(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            tensors.add(output)
            return output

    polycast.compare(nn.Sequential(*(Noted(4, 4) for _ in range(20))), torch.randn(2, 4))
    assert 0 < max(counts) <= 5


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
def test_a_sparse_buffer_and_parameters_with_nan_are_not_taken_for_written_ones():
    model = torch.nn.Linear(4, 4)
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
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


def test_results_are_copied_and_pickled():
    model, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    compared = polycast.compare(model, x)
    evidence = polycast.tune(model, x, tolerance=1.0).evidence
    for copied in (copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))):
        assert copied(compared).outputs == compared.outputs
        assert str(copied(evidence)) == str(evidence)
        with pytest.raises(TypeError):
            copied(compared).outputs["output"] = None
