"""Rules for modules in compiled, sharded and checkpointed models."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import polycast
from polycast import Policy

RULES = {"blocks.0": "fp32", "blocks.0.inner": "float16", "blocks.1": {"linear": "fp32"}, "head": "fp32"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.outer(self.inner(x).float())


class Model(nn.Module):
    """A model that gives what each of its parts does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        outputs = [self.blocks[0].inner(x), x := self.blocks[0](x), x := self.blocks[1](x)]
        return *outputs, self.head(x), torch.mm(x, x.T)


def dtypes(model, **settings):
    with polycast.autocast("cpu", **settings):
        return [y.dtype for y in model(torch.ones(2, 4))]


UNDER = [torch.float16, torch.float32, torch.float32, torch.float32, torch.bfloat16]
PLAIN = [torch.bfloat16] * 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed in the scheduler node")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_model_compiled_in_one_graph_follows_its_current_rules(backend):
    model = Model()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert dtypes(compiled) == PLAIN
    handle = polycast.apply_policy(model, Policy(modules=RULES))
    assert dtypes(compiled) == dtypes(model) == UNDER
    assert dtypes(compiled, enabled=False) == [torch.float32] * 5
    with polycast.apply_policy(model, Policy(modules={"head": "float16", "blocks.1": {"linear": "passthrough"}})):
        assert dtypes(compiled) == dtypes(model) == [*UNDER[:3], torch.float16, UNDER[4]]
    assert dtypes(compiled) == UNDER
    handle.remove()
    assert dtypes(compiled) == PLAIN


def test_values_and_gradients_of_a_compiled_model_equal_those_of_eager_mode():
    torch.manual_seed(0)
    model = Model()
    polycast.apply_policy(model, Policy(modules=RULES))

    def gradients(function):
        model.zero_grad()
        with polycast.autocast("cpu"):
            y = function(torch.linspace(-1, 1, 8).reshape(2, 4))[3]
        y.sum().backward()
        return [y.detach(), *(parameter.grad for parameter in model.parameters())]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(model), rtol=1e-2, atol=1e-2)


@dataclass
class Output:
    y: object


class Containers(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, [{"y": y.relu()}], Output(y)


@pytest.mark.parametrize("around", ["fp32", "bfloat16"])
def test_compiled_code_casts_what_a_module_returns(around):
    model = nn.ModuleDict({"inner": Containers(4, 4)})
    model.forward = lambda x: model["inner"](x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def outputs(model):
        with polycast.autocast("cpu"):
            one, [another], output = model(torch.linspace(-1, 1, 8).reshape(2, 4))
        assert type(output) is Output
        return one, another["y"], output.y

    for dtype in (torch.float16, torch.float32):
        rules = Policy(modules={"": around, "inner": {"linear": "promote", "output": dtype}})
        with polycast.apply_policy(model, rules):
            found = outputs(compiled)
            assert [y.dtype for y in found] == [dtype] * 3
            torch.testing.assert_close(found, outputs(model), rtol=1e-2, atol=1e-2)
    assert [y.dtype for y in outputs(compiled)] == [torch.bfloat16] * 3


def exported(rule, strict=False):
    """Return the dtype that an exported program gives, of a model whose last layer has a rule."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    polycast.apply_policy(model, Policy(modules={"1": rule}))
    with polycast.autocast("cpu"):
        return torch.export.export(model, (x,), strict=strict).module()(x).dtype


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_casts_what_a_module_returns(strict):
    assert exported({"output": "float32"}, strict) is torch.float32


def test_an_exported_program_has_the_rules_for_dtypes_in_it():
    assert exported("fp32") is torch.float32
    with pytest.raises(RuntimeError, match=r"a region with policy= cannot be exported"):
        exported({"linear": "fp32"})


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("policy", [Policy(modules={"": "fp32"}), Policy({"linear": "fp32"})], ids=["rule", "ops"])
@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Model], ids=["torch's", "own"])
def test_a_model_that_was_compiled_with_a_rule_of_its_own_runs_compiled_without_it(make, policy, fullgraph):
    counter = CompileCounter()
    model = make()
    rules = polycast.apply_policy(model, policy)
    compiled = torch.compile(model, backend=counter, fullgraph=fullgraph)
    x = torch.ones(1, 4)
    with polycast.autocast("cpu"):
        compiled(x)
        assert counter.frame_count == 1
        rules.remove()
        compiled(x)
        assert counter.frame_count == 2
        with polycast.apply_policy(model, Policy(modules={"": "float16"})):
            compiled(x)
        compiled(x)
    assert counter.frame_count == 3


def test_a_model_that_is_compiled_with_a_rule_and_first_called_without_it_is_compiled():
    counter = CompileCounter()
    model = nn.Sequential(nn.Linear(4, 4))
    with polycast.apply_policy(model, Policy(modules={"": "fp32"})):
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    with polycast.autocast("cpu"):
        assert compiled(torch.ones(1, 4)).dtype is torch.bfloat16
    assert counter.frame_count == 1


@pytest.mark.slow
def test_a_model_whose_rules_are_older_than_dynamo_runs_compiled_without_them(launch):
    program = """
import sys, warnings, torch, polycast
warnings.simplefilter("error", UserWarning)
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
rules = polycast.apply_policy(model, polycast.Policy(modules={"": "fp32"}))
assert "torch._dynamo" not in sys.modules
compiled = torch.compile(model, backend="eager", fullgraph=True)
rules.remove()
print(compiled(torch.ones(1, 4)).shape)
"""
    ran = launch(program)
    assert ran.stdout == "torch.Size([1, 4])\n", ran.stderr
