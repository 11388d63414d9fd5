"""Models of a program are named after their classes when they are called."""

import gc

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from polycast_plugins.observe.observer import observe_program

X = torch.ones(1, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x):
        return self.rest(self.first(x))


def entries(seen):
    return {module.module: module.entries for module in seen.modules if module.entries}


def test_model_is_named_after_its_class(engine):
    net = Net()
    with observe_program() as seen:
        net(X)
        nn.MSELoss()(net(X), torch.ones(1, 2))
    assert entries(seen) == {
        "Net": 2,
        "Net.first": 2,
        "Net.rest": 2,
        "Net.rest.0": 2,
        "Net.rest.1": 2,
        "MSELoss": 1,
    }
    (top,) = [module for module in seen.modules if module.module == "Net"]
    assert (top.kind, top.calls) == ("Net", 0)
    assert top.total.calls > 0


def test_models_of_one_class_are_numbered(engine):
    one, other = nn.ReLU(), nn.ReLU()
    with observe_program() as seen:
        for each in (one, other, one):
            each(X)
    assert entries(seen) == {"ReLU": 2, "ReLU#2": 1}


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


def test_module_called_before_its_model_is_renamed(engine):
    net = Net()
    with observe_program() as seen:
        net.first(X)
        net(X)
    assert (entries(seen)["Linear"], entries(seen)["Net.first"]) == (1, 1)


def test_added_module_is_named_when_called(engine):
    net = nn.Sequential(nn.ReLU())
    with observe_program() as seen:
        net(X)
        net.append(nn.Tanh())
        net(X)
        net[0] = nn.Sigmoid()
        net(X)
    assert entries(seen) == {"Sequential": 3, "Sequential.0": 3, "Sequential.1": 2}


def test_module_outside_of_models_is_part_of_its_caller(engine):
    class Calls(nn.Module):
        def forward(self, x):
            return hidden[0](x)

    hidden = [nn.ReLU()]
    with observe_program() as seen:
        Calls()(X)
    assert entries(seen) == {"Calls": 1}
    assert [op.op for op in seen.modules[0].ops] == ["aten::relu"]


def test_model_that_cannot_be_traversed_runs(engine):
    class Fails(nn.Module):
        def named_modules(self, *args, **kwargs):
            raise ValueError

        def forward(self, x):
            return x.relu()

    with observe_program() as seen:
        assert Fails()(X).tolist() == [[1.0] * 4]
    assert entries(seen) == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_model_that_raises_is_left(engine, error):
    class Raises(nn.Module):
        def forward(self, x):
            raise error

    with observe_program() as seen:
        with pytest.raises(error):
            nn.Sequential(Raises())(X)
        nn.ReLU()(X)
    assert entries(seen) == {"Sequential": 1, "Sequential.0": 1, "ReLU": 1}


def test_compiled_models_are_compiled_once(engine):
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(Net(), backend=counter)
    with torch.no_grad(), observe_program() as seen:
        compiled(X)
        compiled(X)
    with torch.no_grad():
        compiled(X)
    assert counter.frame_count == 1
    assert [code.module for code in seen.compiled] == ["OptimizedModule"]
    torch._dynamo.reset()
