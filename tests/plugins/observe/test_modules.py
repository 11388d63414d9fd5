"""Counts by module, in the forward and the backward pass, of a given model and of those that a program calls."""

import copy
import gc
import weakref

import pytest
import torch
import torch._dynamo.testing
from tests.plugins.models import Defined
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast
from polycast_plugins.observe.observer import observe_program


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2))


def calls(seen, module, op, phase="forward"):
    (found,) = [each for each in seen.modules if each.module == module]
    return sum(each.calls for each in found.ops if (each.op, each.phase) == (op, phase))


def entries(seen):
    return {module.module: module.entries for module in seen.modules if module.entries}


X = torch.ones(1, 4)
OBSERVERS = pytest.mark.parametrize(
    ("observer", "prefix"),
    [(polycast.observe, ""), (lambda net: observe_program(), "Sequential.")],
    ids=["model", "program"],
)


def test_ops_are_counted_for_the_innermost_module(engine, no_grad):
    net = model()
    with polycast.observe(net) as seen, polycast.autocast("cpu"):
        net(X)
        net[0](X)
        X.relu()
    assert [(module.module, module.kind, module.entries) for module in seen.modules] == [
        ("", "Sequential", 1),
        ("0", "Linear", 2),
        ("1", "Sequential", 1),
        ("1.0", "ReLU", 1),
        ("1.1", "Linear", 1),
        ("2", "Linear", 1),
    ]
    assert [calls(seen, name, "aten::linear") for name in ("", "0", "1", "1.1", "2")] == [0, 2, 0, 1, 1]
    assert [calls(seen, each.module, "aten::relu") for each in seen.modules] == [0, 0, 0, 1, 0, 0]
    assert sum(op.calls for op in seen.ops if op.op == "aten::relu") == 2


def test_casts_are_counted_by_module_and_totals_include_inner_modules(engine):
    net = model()
    with torch.no_grad(), polycast.observe(net) as seen, polycast.autocast("cpu"):
        net(X)
    assert {(cast.module, cast.of): cast.count for cast in seen.casts} == {
        ("0", "weight"): 2,
        ("0", "activation"): 1,
        ("1.1", "weight"): 2,
        ("2", "weight"): 2,
    }
    total = {module.module: module.total for module in seen.modules}
    assert total[""].casts == sum(module.casts for module in seen.modules) == 7
    assert total["1"].casts == 2
    assert {module.module: module.casts for module in seen.modules}["1"] == 0


@pytest.mark.parametrize("is_inside", [False, True], ids=["before the block", "inside"])
@OBSERVERS
def test_modules_have_their_rules(engine, observer, prefix, is_inside):
    net = model()
    rules = polycast.Policy(modules={"1": "fp32", "2": {"output": "float32"}})
    if not is_inside:
        polycast.apply_policy(net, rules)
    with observer(net) as seen, polycast.autocast("cpu"):
        net(X)
        if is_inside:
            polycast.apply_policy(net, rules)
        net(X)
    assert {each.module: each.rule for each in seen.modules if each.rule} == {
        f"{prefix}1": "1 = 'fp32'",
        f"{prefix}2": "2 = {'output': 'float32'}",
    }


def test_backward_ops_belong_to_the_module_of_their_node_or_parameter(engine):
    net = model()
    with polycast.observe(net) as seen:
        for _ in range(2):
            with polycast.autocast("cpu"):
                loss = net(X).float().sum()
            loss.backward()
    assert [calls(seen, name, "aten::mm", "backward") for name in ("0", "1.1", "2")] == [2, 4, 4]
    assert calls(seen, "1.0", "aten::threshold_backward", "backward") == 2
    assert [calls(seen, name, "aten::add_.Tensor", "backward") for name in ("0", "1.1", "2")] == [2, 2, 2]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_ops_belong_to_their_module_in_the_backward_pass(engine, use_reentrant):
    net = model()
    with polycast.observe(net) as seen:
        checkpoint(net[1], torch.ones(1, 4, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert calls(seen, "1.1", "aten::linear") == 1
    assert calls(seen, "1.1", "aten::linear", "backward") == 1
    assert calls(seen, "1.1", "aten::mm", "backward") >= 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@OBSERVERS
def test_exception_leaves_a_module(engine, observer, prefix, error):
    def forward(self, x):
        if x.numel() == 1:
            raise error
        return x.relu()

    net = nn.Sequential(Defined(forward))
    with observer(net) as seen:
        with pytest.raises(error):
            net(torch.ones(1))
        torch.ones(2).relu()
        net(torch.ones(2))
    assert (calls(seen, f"{prefix}0", "aten::relu"), set(entries(seen).values())) == (1, {2})
    assert sum(op.calls for op in seen.ops if op.op == "aten::relu") == 2


@pytest.mark.slow
def test_model_may_be_collected_while_observed(engine):
    net = model()
    kept, died = net[2], weakref.ref(net)
    with torch.no_grad(), polycast.observe(net) as seen:
        net(X)
        del net
        gc.collect()
        assert died() is None
        others = [nn.Linear(4, 2) for _ in range(100)]
        for other in others:
            other(X)
        kept(X)
    assert sum(module.entries for module in seen.modules) == 7
    assert calls(seen, "2", "aten::linear") == 2


@OBSERVERS
def test_modules_outside_of_models_are_part_of_their_caller(engine, observer, prefix):
    hidden = [nn.ReLU()]
    net = nn.Sequential(Defined(lambda self, x: copy.deepcopy(hidden)[0](hidden[0](x))))
    with observer(net) as seen:
        net(X)
    assert calls(seen, f"{prefix}0", "aten::relu") == 2
    assert list(entries(seen)) == [prefix.rstrip("."), f"{prefix}0"]


def test_two_observers_each_have_their_own_model_and_leave_nothing_in_torch(engine, no_grad):
    net, call = model(), nn.Module.__call__
    with polycast.observe(net) as outer:
        with polycast.observe(net[1]) as inner:
            net(X)
        net(X)
    assert nn.Module.__call__ is call
    assert (calls(outer, "1.1", "aten::linear"), calls(inner, "1", "aten::linear")) == (2, 1)
    assert [module.entries for module in inner.modules] == [1, 1, 1]
    assert 2 * sum(op.calls for op in inner.ops) == sum(op.calls for op in outer.ops)


def test_another_wrapper_of_module_calls_may_stay(engine):
    net = nn.Sequential(nn.ReLU())
    found = []
    with polycast.observe(net):
        below = nn.Module.__call__

        def wrapped(self, *args, **kwargs):
            found.append(self)
            return below(self, *args, **kwargs)

        nn.Module.__call__ = wrapped
    try:
        with polycast.observe(net) as seen:
            net(torch.ones(2))
        assert nn.Module.__call__ is wrapped
    finally:
        nn.Module.__call__ = below
    with polycast.observe(net):  # takes its own out, too
        pass
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert found[0] is net
    assert [module.entries for module in seen.modules] == [1, 1]


def test_models_are_named_after_their_class_and_number(engine):
    net, one, other = model(), nn.ReLU(), nn.ReLU()
    with observe_program() as seen:
        net[0](X)
        for each in (net, net, one, other, one):
            each(X)
    names = ("Sequential", *(f"Sequential.{name}" for name in ("0", "1", "1.0", "1.1", "2")))
    assert entries(seen) == {"Linear": 1, **dict.fromkeys(names, 2), "ReLU": 2, "ReLU#2": 1}
    (top,) = [module for module in seen.modules if module.module == "Sequential"]
    assert (top.kind, top.calls) == ("Sequential", 0)
    assert top.total.calls > 0


@pytest.mark.slow
def test_temporary_models_do_not_grow_memory(engine):
    observer = observe_program()
    with observer as seen:
        for _ in range(200):
            nn.Sequential(nn.ReLU())(X)
        gc.collect()
        known = observer._running[-1]._modules
        assert len(known._alive) <= 2
    assert entries(seen) == {"Sequential": 200, "Sequential.0": 200}


def test_added_module_is_named_when_called(engine):
    net = nn.Sequential(nn.ReLU())
    with observe_program() as seen:
        net(X)
        net.append(nn.Tanh())
        net(X)
        net[0] = nn.Sigmoid()
        net(X)
    assert entries(seen) == {"Sequential": 3, "Sequential.0": 3, "Sequential.1": 2}


def test_model_that_cannot_be_traversed_runs(engine):
    class Fails(nn.Module):
        def named_modules(self, *args, **kwargs):
            raise ValueError

        def forward(self, x):
            return x.relu()

    with observe_program() as seen:
        assert Fails()(X).tolist() == [[1.0] * 4]
    assert entries(seen) == {}


def test_compiled_models_are_compiled_once(engine, fresh_dynamo):
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model(), backend=counter)
    with torch.no_grad(), observe_program() as seen:
        compiled(X)
        compiled(X)
    with torch.no_grad():
        compiled(X)
    assert counter.frame_count == 1
    assert [code.module for code in seen.compiled] == ["OptimizedModule"]
