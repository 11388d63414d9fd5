"""``rules_of`` and ``remove_policy``: the rules of a model that nobody has a handle of."""

import copy
import functools
import inspect
import types

import pytest
import torch
from torch import nn

import polycast
from polycast import Policy, apply_policy, remove_policy, rules_of


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def dtype_in_a_region(model):
    with polycast.autocast("cpu"):
        return model(torch.ones(1, 4)).dtype


def test_a_model_without_rules(model):
    assert rules_of(model) == {}
    remove_policy(model)
    assert "forward" not in vars(model[0])


def test_the_rules_that_decide_are_returned(model):
    apply_policy(model, Policy(modules={"*": "fp32"}))
    apply_policy(model, Policy(modules={"1": "float16"}, devices={"cuda": Policy(modules={"1": "off"})}))
    assert rules_of(model) == {"0": "* = 'fp32'", "1": "1 = 'float16', cuda: 1 = 'off'"}


def test_rules_of_all_calls_are_removed(model):
    first, second = (apply_policy(model, Policy(modules={"1": rule})) for rule in ("fp32", "off"))
    remove_policy(model)
    assert dtype_in_a_region(model) is torch.bfloat16
    second.remove()
    first.remove()
    assert dtype_in_a_region(model) is torch.bfloat16


def test_a_forward_that_was_wrapped_since_stays_and_has_no_rules(model):
    apply_policy(model, Policy(modules={"1": "fp32"}))
    ruled = model[1].forward

    def wrapper(x):
        return ruled(x)

    wrapper.__wrapped__ = ruled
    model[1].forward = wrapper
    remove_policy(model)
    assert rules_of(model) == {}
    assert vars(model[1])["forward"] is wrapper
    assert dtype_in_a_region(model) is torch.bfloat16


@pytest.mark.slow
def test_compiled_code_follows(model, engine):
    apply_policy(model, Policy(modules={"1": "fp32"}))
    compiled = torch.compile(model, backend="eager")
    assert dtype_in_a_region(compiled) is torch.float32
    remove_policy(compiled)
    assert dtype_in_a_region(compiled) is torch.bfloat16


@pytest.mark.parametrize("function", [rules_of, remove_policy])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(TypeError, match="^model must be a torch.nn.Module, got int$"):
        function(3)


def test_a_copy_of_a_model_whose_unbound_forward_was_wrapped_runs_itself(model):
    apply_policy(model, {"linear": "fp32"})
    unbound = model.forward.__func__

    @functools.wraps(unbound)
    def wrapper(module, *args):
        return unbound(module, *args)

    model.forward = types.MethodType(wrapper, model)
    assert rules_of(model) == {"": "ops"}
    assert [*inspect.signature(model.forward).parameters] == ["input"]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(torch.ones(1, 4)).any()
    assert dtype_in_a_region(copied) is torch.float32
