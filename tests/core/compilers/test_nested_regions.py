"""torch.compiler.nested_compile_region in code that switches autocast, or puts modules under rules."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.compiler import nested_compile_region

import polycast
from polycast import Policy

pytestmark = pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed in the scheduler node")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @nested_compile_region
    def forward(self, x):
        return self.inner(x)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        return [block(x) for block in self.blocks]


class Switching(Blocks):
    """The same block in four states of autocast."""

    def forward(self, x):
        first = self.blocks[0](x)
        with polycast.autocast("cpu", policy={"linear": "fp32"}):
            second = self.blocks[1](x)
        with polycast.autocast("cpu", torch.float16):
            third = self.blocks[2](x)
        with torch.autocast("cpu", enabled=False):
            fourth = self.blocks[3](x)
        return first, second, third, fourth, self.blocks[4](x)


def compiled(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def run(model):
    torch.manual_seed(0)
    x = torch.randn(2, 4, requires_grad=True)
    with polycast.autocast("cpu"):
        outputs = model(x)
    sum(y.float().sum() for y in outputs).backward()
    return [*outputs, x.grad]


def assert_same(outputs, expected):
    torch.testing.assert_close(outputs, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_a_nested_region_computes_in_the_state_of_each_of_its_calls(backend):
    model = Switching()
    assert_same(run(compiled(model, backend)), run(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        {"blocks.1": "fp32", "blocks.2": "float16"},
        {"blocks.0.inner": "fp32", "blocks.1.inner": "float16", "blocks.2.inner": "off"},
        {"blocks.1": {"linear": "fp32"}},
        {"": {"linear": "fp32"}, "blocks.2": "float16"},
    ],
    ids=["blocks", "inside", "ops", "model"],
)
def test_a_nested_region_follows_the_rules_of_each_module_that_calls_it(backend, rules):
    model = Blocks()
    polycast.apply_policy(model, Policy(modules=rules))
    assert_same(run(compiled(model, backend)), run(model))


def test_a_module_under_a_rule_can_be_made_a_nested_region(backend):
    plain, ruled = nn.Linear(4, 4), nn.Linear(4, 4)
    polycast.apply_policy(ruled, {"linear": "fp32"})
    regions = [nested_compile_region(module) for module in (plain, ruled, plain)]

    def model(x):
        return [region(x) for region in regions]

    assert_same(run(compiled(model, backend)), run(lambda x: [plain(x), ruled(x), plain(x)]))


def test_the_gradients_of_what_policies_keep_in_float32_are_not_rounded_in_a_nested_region(backend):
    model = Blocks()
    x = torch.randn(2, 4, requires_grad=True)

    def gradients(function, **settings):
        with polycast.autocast("cpu", **settings):
            outputs = function(x)
        return torch.autograd.grad([y.float().square().sum() for y in outputs], [x, *model.parameters()])

    torch.testing.assert_close(
        gradients(compiled(model, backend), policy={"linear": "fp32"}), gradients(model, enabled=False)
    )


def test_calls_in_one_state_are_still_traced_once():
    graphs = EagerAndRecordGraphs()
    with torch.no_grad(), polycast.autocast("cpu"):
        torch.compile(Blocks(), backend=graphs, fullgraph=True)(torch.ones(2, 4))
    assert [name for graph in graphs.graphs for name, _ in graph.named_children()] == ["subgraph_0"]


def test_rules_that_have_switched_autocast_off_compile_nothing_again_nor_on_another_thread(in_thread):
    model = Blocks()
    polycast.apply_policy(model, Policy(modules={"blocks.1": "fp32"}))
    function = compiled(model, "aot_eager")
    expected = run(model)
    first = run(function)
    with torch.compiler.set_stance("fail_on_recompile"):
        again, elsewhere = run(function), in_thread(lambda: run(function))
    for outputs in (first, again, elsewhere):
        assert_same(outputs, expected)
