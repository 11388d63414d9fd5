"""Keys of module rules, and modules that cannot be under a rule: refusals change nothing."""

import functools
import pickle

import pytest
import torch
from torch import nn

import polycast
from polycast import Policy

pytestmark = pytest.mark.usefixtures("engine")


class Named(nn.Module):
    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))

    def forward(self, x):
        return x


BRACKETS = [
    ("[^0]", {"0", "^"}),
    ("[!^]", {"0", "d", "-", "\\"}),
    (r"[\d]", {"d", "\\"}),
    ("[[0]", {"0"}),
    ("[a-d]", {"d"}),
    ("[0-]", {"0", "-"}),
    ("[a&&0]", {"0"}),
    ("[--0]", {"0", "-"}),
]


def test_brackets_match_characters_and_ranges(subtests):
    for key, found in BRACKETS:
        with subtests.test(key=key, found=found):
            model = Named("0", "d", "^", "-", "\\")
            assert set(polycast.apply_policy(model, Policy(modules={key: "fp32"})).rules) == found


class Counting(Named):
    listed = 0

    def named_modules(self, *args, **keywords):
        self.listed += 1
        return super().named_modules(*args, **keywords)


def test_the_modules_are_listed_once_however_many_keys_there_are():
    def listed(count):
        names = [f"m{i}" for i in range(count)]
        model = Counting(*names)
        assert len(polycast.apply_policy(model, Policy(modules=dict.fromkeys(names, "fp32"))).rules) == count
        return model.listed

    assert listed(200) == listed(2)


class Closed(nn.Module):
    def __setattr__(self, name, value):
        if name == "forward":
            raise AttributeError("closed")
        super().__setattr__(name, value)

    def forward(self, x):
        return x


def test_a_module_that_lets_nobody_set_its_forward_leaves_the_others_as_they_were():
    model = nn.Sequential(nn.Linear(2, 2), Closed())
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(AttributeError, match="closed"):
        polycast.apply_policy(model, Policy(modules={"**": "fp32"}))
    assert [set(vars(module)) for module in model.modules()] == before


def wrap(module):
    """Put a forward of one's own over the one that is there, as libraries do that move weights for a call."""
    inner = module.forward
    module.forward = functools.update_wrapper(functools.partial(lambda module, *args: inner(*args), module), inner)


def test_later_rules_decide_also_where_a_forward_was_put_over_the_earlier_ones():
    module, x, found = nn.Linear(2, 2), torch.ones(1, 2), []
    with polycast.autocast("cpu"):
        first = polycast.apply_policy(module, Policy(modules={"**": "fp32"}))
        wrap(module)
        second = polycast.apply_policy(module, Policy(modules={"**": "float16"}))
        found.append(module(x).dtype)
        for earlier in (second, first):
            earlier.remove()
            found.append(module(x).dtype)
        polycast.apply_policy(module, Policy(modules={"**": "float16"}))
        found.append(module(x).dtype)
    assert found == [torch.float16, torch.float32, torch.bfloat16, torch.float16]
    assert isinstance(module.forward, functools.partial)


def test_a_model_from_where_torch_knows_a_device_more_runs_here(monkeypatch):
    known = torch._C._autocast_supported_devices()
    with monkeypatch.context() as there:
        for module in ("policy.value", "region.ruled_forward"):
            there.setattr(f"polycast.{module}.autocast_supported_devices", lambda: [*known, "strange"])
        model = nn.Linear(2, 2)
        polycast.apply_policy(model, Policy(modules={"**": "fp32"}, devices={"strange": Policy({"mm": "fp32"})}))
        saved = pickle.dumps(model)
    with polycast.autocast("cpu"):
        assert pickle.loads(saved)(torch.ones(1, 2)).dtype is torch.float32


def with_forward(forward):
    return type("Odd", (nn.Module,), {"forward": forward})()


def yields(self, x):
    yield x


async def awaits(self, x):
    return x


@pytest.mark.parametrize(
    ("model", "key", "text"),
    [
        (torch.jit.script(nn.Linear(2, 2)), "**", "the model is a ScriptModule, whose forward is not Python"),
        (nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "0", "the module '0' is a ScriptModule"),
        (nn.DataParallel(nn.Linear(2, 2)), "**", "nn.DataParallel, whose replicas would call the original's forward"),
        ("model", "**", "model must be a torch.nn.Module, got str"),
        (with_forward(staticmethod(len)), "**", "has a forward that is not a method of its instances"),
        (with_forward(classmethod(len)), "**", "has a forward that is not a method of its instances"),
        (with_forward(yields), "**", "the model has a forward that is suspended in the middle"),
        (with_forward(awaits), "**", "the model has a forward that is suspended in the middle"),
    ],
    ids=["script", "script inside", "DataParallel", "no module", "static", "class", "generator", "coroutine"],
)
def test_what_cannot_be_under_rules_is_refused(model, key, text):
    with pytest.raises(TypeError, match=text):
        polycast.apply_policy(model, Policy(modules={key: "fp32"}))
