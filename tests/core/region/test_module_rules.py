"""Module rules: which modules they match, their effect, and what does not change in the model."""

import copy
import inspect
import io
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import polycast
from polycast import Policy

pytestmark = pytest.mark.usefixtures("engine")


class Spy(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.seen = (str(x.dtype).removeprefix("torch."), str(y.dtype).removeprefix("torch."))
        return y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Spy(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x, *, scale=1.0):
        return self.norm(self.attn(x)) * scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = Spy(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=2.0)
        return self.head(x)


def run(model, **settings):
    """Run a model in a region, and return the output dtype of each layer by name."""
    with polycast.autocast("cpu", **settings):
        model(torch.ones(2, 4))
    return outputs(model)


def outputs(model):
    return {name: module.seen[1] for name, module in model.named_modules() if isinstance(module, Spy)}


def under(modules, **kwargs):
    model = Model()
    return model, polycast.apply_policy(model, Policy(modules=modules, **kwargs))


PLAIN = {"blocks.0.attn": "bfloat16", "blocks.1.attn": "bfloat16", "head": "bfloat16"}


@pytest.mark.parametrize(
    ("modules", "changed"),
    [
        ({"head": "fp32"}, {"head": "float32"}),
        ({"head": "float16"}, {"head": "float16"}),
        ({"head": {"linear": "fp32"}}, {"head": "float32"}),
        ({"blocks.*.attn": "fp32"}, {"blocks.0.attn": "float32", "blocks.1.attn": "float32"}),
        ({"**.attn": "float16"}, {"blocks.0.attn": "float16", "blocks.1.attn": "float16"}),
        ({"**": "fp32"}, dict.fromkeys(PLAIN, "float32")),
        ({"*": "off"}, dict.fromkeys(PLAIN, "float32")),
        ({"blocks": "fp32"}, {"blocks.0.attn": "float32", "blocks.1.attn": "float32"}),
        ({"blocks.**": "fp32"}, {"blocks.0.attn": "float32", "blocks.1.attn": "float32"}),
        ({"class:torch.nn.Linear": "fp32"}, dict.fromkeys(PLAIN, "float32")),
        ({"class:torch.nn.modules.linear.Linear": "fp32"}, dict.fromkeys(PLAIN, "float32")),
        ({"class:Spy": "fp32"}, dict.fromkeys(PLAIN, "float32")),
        ({f"class:{__name__}.Block": "fp32"}, {"blocks.0.attn": "float32", "blocks.1.attn": "float32"}),
        # Of several that match, the last decides.
        ({"**.attn": "fp32", "blocks.0.attn": "float16"}, {"blocks.0.attn": "float16", "blocks.1.attn": "float32"}),
        ({"blocks.0.attn": "float16", "**.attn": "fp32"}, {"blocks.0.attn": "float32", "blocks.1.attn": "float32"}),
    ],
)
def test_a_module_computes_as_its_rule_says(modules, changed):
    model, _ = under(modules)
    assert run(model) == PLAIN | changed


@pytest.mark.parametrize(
    ("rule", "dtype", "refused"),
    [
        *(("fp32", dtype, False) for dtype in (torch.bfloat16, torch.float32)),
        ("fp32", torch.float64, True),  # which is nobody's to cast, in a region as outside
        *(("off", dtype, dtype is torch.bfloat16) for dtype in (torch.bfloat16, torch.float32)),
    ],
)
def test_with_fp32_inputs_are_cast_and_with_off_they_are_not(rule, dtype, refused):
    head = under({"head": rule})[0].head
    with polycast.autocast("cpu"), pytest.raises(RuntimeError, match="same dtype") if refused else nullcontext():
        head(torch.ones(2, 4, dtype=dtype))
        assert head.seen == ("float32", "float32")


def test_the_ops_of_a_policy_hold_in_the_whole_model():
    model, _ = under({"head": "float16"}, ops={"linear": "fp32"})
    assert run(model) == {"blocks.0.attn": "float32", "blocks.1.attn": "float32", "head": "float32"}


def test_a_rule_for_one_device_is_nothing_on_another():
    model, handle = under({"head": "fp32"}, devices={"cuda": Policy(modules={"blocks.0": "fp32", "head": "float16"})})
    assert run(model) == PLAIN | {"head": "float32"}
    assert handle.rules["head"] == "head = 'fp32', cuda: head = 'float16'"
    assert set(handle.rules) == {"head", "blocks.0"}
    on_cpu, _ = under({"head": "fp32"}, devices={"cpu": Policy(modules={"head": "float16"})})
    assert run(on_cpu) == PLAIN | {"head": "float16"}


NO_MATCHES = [
    ("haed", "modules['haed'] matches no module of the model; the nearest is 'head'"),
    ("blocks.*.atn", "modules['blocks.*.atn'] matches no module of the model; the nearest are"),
    *((key, "matches no module of the model") for key in ("xyz", "blocks.0\n", "blocks.[!]", "blocks.[]")),
    ("class:torch.nn.LayerNrom", "'class:torch.nn.LayerNorm'"),
    ("class:torch.nn.Conv2d", "modules['class:torch.nn.Conv2d'] matches no module of the model"),
]


def test_a_key_that_matches_nothing_is_refused_and_nothing_is_changed(subtests):
    for key, text in NO_MATCHES:
        with subtests.test(key=key, text=text):
            model = Model()
            with pytest.raises(ValueError, match=re.escape(text)):
                polycast.apply_policy(model, Policy(modules={"head": "fp32", key: "off"}))
            assert all("forward" not in vars(module) for module in model.modules())


def test_a_module_with_two_names_has_the_last_rule_that_matches_either():
    model = nn.Sequential(Spy(4, 4), nn.Identity())
    model.add_module("again", model[0])
    polycast.apply_policy(model, Policy(modules={"0": "fp32", "again": "float16"}))
    assert run(model) == {"0": "float16"}
    model[0].forward = Spy.forward.__get__(model[0])
    polycast.apply_policy(model, Policy(modules={"again": "float16", "0": "fp32"}))
    assert run(model) == {"0": "float32"}


def test_of_two_policies_the_later_decides_where_both_match_until_it_is_removed():
    model = Model()
    first = polycast.apply_policy(model, Policy(modules={"head": "fp32", "blocks.0": "fp32"}))
    second = polycast.apply_policy(model, Policy(modules={"head": "float16"}))
    assert run(model) == PLAIN | {"head": "float16", "blocks.0.attn": "float32"}
    second.remove()
    assert run(model) == PLAIN | {"head": "float32", "blocks.0.attn": "float32"}
    third = polycast.apply_policy(model, Policy(modules={"head": "float16"}))
    first.remove()
    assert run(model) == PLAIN | {"head": "float16"}
    third.remove()
    assert run(model) == PLAIN


def everything(model):
    return [(name, list(vars(module)), type(module)) for name, module in model.named_modules()]


def test_removing_leaves_nothing_behind():
    model = Model()
    before = everything(model)
    handle = polycast.apply_policy(model, Policy({"mm": "fp32"}, {"**": "fp32"}))
    assert everything(model) != before
    handle.remove()
    handle.remove()
    assert everything(model) == before
    assert handle.rules == {}
    with polycast.apply_policy(model, Policy(modules={"head": "fp32"})) as held:
        assert held.rules == {"head": "head = 'fp32'"}
    assert everything(model) == before


def test_state_dict_names_and_signature_are_the_models():
    model = Model()
    keys, names, modules = list(model.state_dict()), dict(model.named_parameters()), dict(model.named_modules())
    signature = inspect.signature(model.blocks[0].forward)
    polycast.apply_policy(model, Policy(modules={"**": "fp32"}))
    assert list(model.state_dict()) == keys
    assert list(dict(model.named_parameters())) == list(names)
    assert dict(model.named_modules()) == modules
    assert inspect.signature(model.blocks[0].forward) == signature
    assert model.blocks[0].forward.__name__ == "forward"
    assert model.blocks[0].forward.__self__ is model.blocks[0]
    model.load_state_dict(Model().state_dict())


def saved_and_loaded(model):
    torch.save(model, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_has_the_rules_on_its_own_modules(copied):
    model, handle = under({"head": "fp32", "blocks.0": {"linear": "fp32"}})
    other, plain = copied(model), copied(model)
    assert other.head.forward.module is other.head
    polycast.remove_policy(plain)
    assert everything(plain) == everything(Model())
    assert polycast.rules_of(plain) == {}
    assert polycast.rules_of(other) == handle.rules
    assert run(plain) == PLAIN
    assert run(model) == PLAIN | {"head": "float32", "blocks.0.attn": "float32"}
    handle.remove()
    with torch.no_grad():
        other.head.weight.zero_()
    assert run(other) == PLAIN | {"head": "float32", "blocks.0.attn": "float32"}
    assert run(model) == PLAIN
    with polycast.autocast("cpu"):
        assert other(torch.ones(1, 4)).sum().item() == pytest.approx(other.head.bias.sum().item())
    later = polycast.apply_policy(other, Policy(modules={"head": "float16"}))
    assert run(other)["head"] == "float16"
    later.remove()
    assert run(other)["head"] == "float32"


def test_a_part_of_the_model_is_saved_without_the_rest():
    model, _ = under({"**": "fp32"})
    torch.save(model.head, file := io.BytesIO())
    assert b"blocks" not in file.getvalue()


def test_an_exception_leaves_the_state_as_it_was():
    class Failing(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(4, 4), Failing())
    polycast.apply_policy(model, Policy(modules={"**": "fp32", "1": "float16"}))
    with polycast.autocast("cpu"):
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 4))
        assert polycast.autocast_nesting("cpu") == 1
        assert polycast.is_autocast_enabled("cpu")
        assert polycast.get_autocast_dtype("cpu") is torch.bfloat16
        inner = Spy(4, 4)
        polycast.apply_policy(inner, Policy(modules={"**": "float16"}))
        with polycast.autocast("cpu", enabled=False):  # no rule has switched autocast off here any more
            inner(torch.ones(1, 4))
        assert inner.seen == ("float32", "float32")


def test_hooks_run_outside_of_the_rule_and_a_direct_call_inside():
    model, _ = under({"head": "fp32"})
    states = []
    model.head.register_forward_pre_hook(lambda *_: states.append(polycast.is_autocast_enabled("cpu")))
    model.head.register_forward_hook(lambda *_: states.append(polycast.is_autocast_enabled("cpu")))
    assert run(model)["head"] == "float32"
    assert states == [True, True]
    with polycast.autocast("cpu"):
        model.head.forward(torch.ones(1, 4))
    assert model.head.seen[1] == "float32"
    assert len(states) == 2


def test_a_forward_of_the_instance_is_called_and_put_back():
    model, calls = Model(), []
    own = model.head.forward
    model.head.forward = counting = lambda x: calls.append(x) or own(x)
    handle = polycast.apply_policy(model, Policy(modules={"head": "fp32"}))
    assert run(model)["head"] == "float32"
    handle.remove()
    assert model.head.forward is counting
    assert len(calls) == 1


def test_functional_call_follows_the_rules():
    model, _ = under({"head": "fp32"})
    parameters = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    with polycast.autocast("cpu"):
        y = torch.func.functional_call(model, parameters, torch.ones(2, 4))
    assert y.dtype is torch.float32
    assert y.abs().sum() == 0
    assert outputs(model) == PLAIN | {"head": "float32"}


def test_a_model_under_rules_is_not_scripted_nor_replicated_and_traced_with_them():
    model, handle = under({"head": "fp32"})
    with pytest.raises(AttributeError, match="under the rules of polycast.apply_policy cannot be scripted"):
        torch.jit.script(nn.Sequential(model.head))
    with pytest.raises(RuntimeError, match="cannot be replicated by nn.DataParallel"):
        model.head._replicate_for_data_parallel()
    with polycast.autocast("cpu", cache_enabled=False):
        traced = torch.jit.trace(nn.Sequential(model.head), torch.ones(1, 4), check_trace=False)
    assert traced(torch.ones(1, 4)).dtype is torch.float32
    handle.remove()
    model.head._replicate_for_data_parallel()


def test_a_path_and_a_mapping_of_ops_are_policies_too(tmp_path):
    Policy(modules={"head": "fp32"}).save(tmp_path / "policy.toml")
    model = Model()
    with polycast.apply_policy(model, tmp_path / "policy.toml"):
        assert run(model) == PLAIN | {"head": "float32"}
    with polycast.apply_policy(model, {"linear": "fp32"}):
        assert run(model) == dict.fromkeys(PLAIN, "float32")


def test_rules_of_an_owner_replace_its_earlier_ones_and_leave_those_of_others():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    polycast.apply_policy(model, Policy(modules={"0": "fp32"}))
    polycast.apply_policy(model, Policy(modules={"1": "fp32"}), owner="acme")
    copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match="matches no module"):
        polycast.apply_policy(copied, Policy(modules={"2": "off"}), owner="acme")
    assert polycast.rules_of(copied) == {"0": "0 = 'fp32'", "1": "1 = 'fp32'"}
    polycast.apply_policy(copied, Policy(modules={"1": "off"}), owner="acme")
    polycast.remove_policy(copied, owner="others")
    assert polycast.rules_of(copied) == {"0": "0 = 'fp32'", "1": "1 = 'off'"}
    polycast.remove_policy(copied, owner="acme")
    assert polycast.rules_of(copied) == {"0": "0 = 'fp32'"}
    assert polycast.rules_of(model) == {"0": "0 = 'fp32'", "1": "1 = 'fp32'"}
