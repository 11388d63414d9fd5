"""Module rules with the dtype of what a module returns."""

import collections
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import Policy

pytestmark = pytest.mark.usefixtures("engine")
X = torch.linspace(-1, 1, 8).reshape(2, 4)
Pair = collections.namedtuple("Pair", "one another")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: object
    more: object = None


class Returning(nn.Module):
    def __init__(self, function=lambda y: y):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(torch.mm(x, x.T))


def under(model, rule, name=""):
    polycast.apply_policy(model, Policy(modules={name: rule}))
    return model


def in_region(model, x=X, **settings):
    with polycast.autocast("cpu", **settings):
        return model(x)


@pytest.mark.parametrize(
    ("rule", "computes", "returns"),
    [
        ({"output": "float32"}, torch.bfloat16, torch.float32),
        ({"output": "float16"}, torch.bfloat16, torch.float16),
        ({"output": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"output": "float64"}, torch.bfloat16, torch.float64),
        ({"mm": "fp32", "output": "float16"}, torch.float32, torch.float16),
        ({"mm": "lower_precision_fp", "output": torch.float32}, torch.bfloat16, torch.float32),
    ],
)
def test_a_module_computes_as_before_and_returns_the_dtype_of_its_rule(rule, computes, returns):
    seen = []
    model = under(Returning(lambda y: seen.append(y.dtype) or y), rule)
    y = in_region(model)
    assert (seen, y.dtype) == ([computes], returns)
    assert torch.equal(y, torch.mm(X.to(computes), X.T.to(computes)).to(returns))


def test_the_ops_of_a_policy_and_a_rule_for_the_model_itself_apply_together():
    model = Returning()
    polycast.apply_policy(model, Policy({"mm": "fp32"}, {"": {"output": "float16"}}))
    assert in_region(model).dtype is torch.float16
    assert torch.equal(in_region(model), torch.mm(X, X.T).half())


def test_each_of_nested_modules_casts_what_it_returns():
    inner, seen = under(Returning(), {"output": "float32"}), []
    outer = under(Returning(lambda y: seen.append(inner(X).dtype) or y), {"output": "float16"})
    assert (in_region(outer).dtype, seen) == (torch.float16, [torch.float32])


def test_outside_of_an_enabled_region_it_has_no_effect():
    model = under(Returning(), {"output": "float32"})
    x = X.bfloat16()
    assert model(x).dtype is torch.bfloat16
    assert in_region(model, x, enabled=False).dtype is torch.bfloat16
    assert in_region(model, x).dtype is torch.float32


@pytest.mark.parametrize("around", ["fp32", "off"])
def test_it_applies_where_a_rule_has_switched_autocast_off_and_the_policies_beside_it_do_not(around):
    model = nn.Sequential(Returning())
    rules = Policy(modules={"": around, "0": {"mm": "lower_precision_fp", "output": "float16"}})
    polycast.apply_policy(model, rules)
    assert torch.equal(in_region(model), torch.mm(X, X.T).half())
    assert in_region(model, enabled=False).dtype is torch.float32


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (y, [y]),
        lambda y: {"y": y, 3: None},
        lambda y: collections.OrderedDict(y=y),
        lambda y: Pair(y, 1),
        lambda y: Output(y, [y, {"y": y}]),
        lambda y: [Output([Output(y)])],
        lambda y: torch.max(y, 0),
        lambda y: pack_sequence([y[0], y[1, :1]]),
    ],
    ids=["tuple", "dict", "ordered dict", "named tuple", "dataclass", "nested", "return type of torch", "packed"],
)
def test_the_tensors_in_a_container_are_cast_and_its_type_is_kept(function):
    found = in_region(under(Returning(function), {"output": "float32"}))
    expected = function(torch.mm(X.bfloat16(), X.T.bfloat16()).float())
    assert type(found) is type(expected)
    assert str(found) == str(expected)


def test_a_container_of_the_module_is_not_changed_and_one_without_casts_is_returned_itself():
    kept = []
    model = under(Returning(lambda y: kept.append(y) or kept), {"output": "float32"})
    found = in_region(model)
    assert (found is kept, found[0].dtype, kept[0].dtype) == (False, torch.float32, torch.bfloat16)
    integers = [torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64), "text"]
    result = Output(integers)
    assert in_region(under(Returning(lambda y: result), {"output": "float32"})) is result
    same = torch.ones(2)
    assert in_region(under(Returning(lambda y: same), {"output": "float32"})) is same


def test_a_tensor_that_is_returned_twice_is_cast_once():
    one, another = in_region(under(Returning(lambda y: (y, Output(y))), {"output": "float32"}))
    assert one is another.logits


def test_a_dataclass_that_contains_itself_is_cast():
    def cyclic(y):
        output = Output([y])
        output.logits.append(output)
        return output

    assert in_region(under(Returning(cyclic), {"output": "float32"})).logits[0].dtype is torch.float32


def test_tensors_of_another_device_are_not_cast_nor_by_its_rule():
    assert in_region(under(Returning(lambda y: y.to("meta")), {"output": "float32"})).dtype is torch.bfloat16
    model = Returning()
    polycast.apply_policy(model, Policy(devices={"cuda": Policy(modules={"": {"output": "float32"}})}))
    assert in_region(model).dtype is torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_those_of_a_cast_by_hand_also_from_a_checkpoint(reentrant):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def gradients(call):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with polycast.autocast("cpu"):
            y = call(x)
        (y * torch.linspace(0, 1, 8).reshape(2, 4)).sum().backward()
        return x.grad, model.weight.grad, model.bias.grad

    by_hand = gradients(lambda x: model(x).float())
    under(model, {"output": "float32"})
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        for expected, found in zip(by_hand, gradients(call), strict=True):
            assert torch.equal(found, expected)
