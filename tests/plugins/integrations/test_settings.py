"""Models whose forward opens regions."""

import contextlib
import copy
import inspect
import pickle

import pytest
import torch

import polycast
from polycast_plugins.integrations.settings import RegionSettings, run_in_regions

from .conftest import dtypes_in_a_region


@pytest.fixture
def in_regions(layers):
    """Return a model whose ReLU is kept in float32 by the regions that its forward opens."""
    run_in_regions(layers, RegionSettings({"relu": "fp32"}))
    return layers


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        (lambda: polycast.autocast("cpu"), [torch.bfloat16, torch.float32, torch.bfloat16]),
        (lambda: torch.autocast("cpu", torch.float16), [torch.float16, torch.float32, torch.float16]),
        (lambda: polycast.autocast("cpu", enabled=False), [torch.float32] * 3),
        (contextlib.nullcontext, [torch.float32] * 3),
    ],
    ids=["a region", "torch's", "disabled", "none"],
)
def test_forward_opens_a_region_inside_an_enabled_one_with_its_dtype(in_regions, region, expected, engine):
    assert dtypes_in_a_region(in_regions, region()) == expected


def test_copies_run_in_regions_without_the_cache_that_cannot_be_pickled(layers):
    run_in_regions(layers, RegionSettings({"relu": "fp32"}, cache=polycast.WeightCache()))
    for copied in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert dtypes_in_a_region(copied) == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_the_signature_is_that_of_the_forward(in_regions):
    assert list(inspect.signature(in_regions.forward).parameters) == ["input"]


def test_a_forward_of_the_instance_is_called(layers):
    layers.forward = lambda x: x + 1
    run_in_regions(layers, RegionSettings())
    with polycast.autocast("cpu"):
        assert torch.equal(layers(torch.zeros(2)), torch.ones(2))


def test_data_parallel_refuses_the_model(in_regions):
    with pytest.raises(RuntimeError, match="cannot be replicated by nn.DataParallel"):
        in_regions._replicate_for_data_parallel()


def test_parameters_without_memory_do_not_decide_the_device():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, device="meta"), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    run_in_regions(model, RegionSettings({"relu": "fp32"}))
    model[0].forward = lambda x: x.bfloat16()
    assert dtypes_in_a_region(model) == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_each_checkpoint_replaces_the_settings_of_the_one_before(layers):
    settings, rules = RegionSettings(), polycast.Policy(modules={"0": "fp32"})
    for policy, recipe in ((polycast.Policy({"relu": "fp32"}), "int8"), (rules, ""), (polycast.Policy({}), "")):
        saved = RegionSettings(policy, recipe or None).state_dict()
        settings.restore(saved, layers)
        assert settings.state_dict() == saved
        assert bool(polycast.rules_of(layers)) == (policy is rules)
    settings.restore({"policy": "", "recipe": ""}, layers)
    assert (settings.policy, settings.recipe) == (None, None)


def test_a_given_policy_is_not_replaced(layers, policy):
    settings = RegionSettings({"relu": "fp32"})
    with pytest.warns(UserWarning, match=r"^the run was saved with the policy .*careful.* leave out policy=$"):
        settings.restore(RegionSettings(policy).state_dict(), layers)
    assert settings.policy == polycast.Policy({"relu": "fp32"})
    assert polycast.rules_of(layers) == {}


def test_settings_of_a_later_run_replace_those_of_the_one_before(layers):
    run_in_regions(layers, RegionSettings(polycast.Policy({"relu": "fp32"}, modules={"0": "fp32"})))
    run_in_regions(layers, RegionSettings(polycast.Policy(modules={"2": "fp32"})))
    assert dtypes_in_a_region(layers) == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert list(polycast.rules_of(layers)) == ["2"]


def test_a_copy_of_a_model_is_under_the_rules_of_its_own_latest_run(layers):
    run_in_regions(layers, RegionSettings(polycast.Policy(modules={"0": "fp32"})))
    copied = copy.deepcopy(layers)
    polycast.apply_policy(copied, polycast.Policy(modules={"1": "fp32"}))
    run_in_regions(copied, RegionSettings(polycast.Policy(modules={"2": "fp32"})))
    assert list(polycast.rules_of(copied)) == ["1", "2"]
    assert list(polycast.rules_of(layers)) == ["0"]


@pytest.mark.parametrize("has_run", [False, True])
def test_rules_that_fit_no_module_leave_the_model_as_it_was(has_run, layers):
    if has_run:
        run_in_regions(layers, RegionSettings(polycast.Policy({"relu": "fp32"}, modules={"0": "fp32"})))
    before, rules = dict(vars(layers)), polycast.rules_of(layers)
    with pytest.raises(ValueError, match="missing"):
        run_in_regions(layers, RegionSettings(polycast.Policy(modules={"missing": "fp32"})))
    assert vars(layers) == before
    assert polycast.rules_of(layers) == rules
