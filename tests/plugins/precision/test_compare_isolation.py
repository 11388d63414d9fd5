"""``compare`` has no side effects, whatever a model's forward does and however it ends."""

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
def test_the_model_its_inputs_and_the_generators_are_restored(make):
    model, x = make(), torch.randn(3, 4, requires_grad=True)
    model(x.clone()).sum().backward()
    gradients = [(id(p.grad), p.grad.tolist()) for p in model.parameters() if p.grad is not None]
    before, given, state = everything(model), (x._version, x.tolist()), (torch.get_rng_state(), random.getstate())
    polycast.compare(model, (x,), device_type="cpu")
    assert everything(model) == before
    assert [(id(p.grad), p.grad.tolist()) for p in model.parameters() if p.grad is not None] == gradients
    assert (x._version, x.tolist()) == given
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


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


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_each_run_sees_the_same_state_and_random_numbers(make):
    policy = {"linear": "fp32"}  # so that casts cause no error
    comparison = polycast.compare(make(), torch.randn(3, 4), device_type="cpu", policy=policy)
    assert {(module.own.relative, module.total.relative) for module in comparison.modules} == {(0.0, 0.0)}


def test_each_run_has_its_own_key_value_cache():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50)).eval()
    policy = {"addmm": "fp32", "linear": "fp32", "scaled_dot_product_attention": "fp32"}
    comparison = polycast.compare(model, torch.randint(50, (1, 5)), device_type="cpu", policy=policy)
    assert {module.own.relative for module in comparison.modules} == {0.0}
    assert len(comparison.outputs) == 5


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


def test_a_banned_op_raises():
    loss = Defined(lambda self, x: nn.functional.binary_cross_entropy(x, torch.ones_like(x)))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), loss)
    with pytest.raises(RuntimeError, match="binary_cross_entropy"):
        polycast.compare(model, torch.randn(3, 4), device_type="cpu", policy={"binary_cross_entropy": "banned"})
    assert "polycast.compare" not in {thread.name for thread in threading.enumerate()}


def test_an_interrupt_ends_both_runs(monkeypatch):
    seen = []

    def interrupted(value):
        seen.append(value)
        raise KeyboardInterrupt

    monkeypatch.setattr("polycast_plugins.precision.record.is_finite", interrupted)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.fill_(1e6)
    with pytest.raises(KeyboardInterrupt):
        polycast.compare(model, torch.ones(3, 4), device_type="cpu", dtype=torch.float16)
    assert len(seen) == 1
    assert "polycast.compare" not in {thread.name for thread in threading.enumerate()}


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


def test_a_compiled_model_runs_eagerly():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(2, 4)
    found = {module.name: module.total for module in polycast.compare(compiled, x, device_type="cpu").modules}
    expected = {module.name: module.total for module in polycast.compare(model, x, device_type="cpu").modules}
    assert {name: found[f"_orig_mod.{name}".rstrip(".")] for name in expected} == expected
