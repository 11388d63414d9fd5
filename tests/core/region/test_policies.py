"""Regions with policies in every form, on both engines, and which rule decides in nested ones."""

import contextlib
import os
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polycast
from polycast import CastPolicy, Policy
from polycast.engine import installation
from polycast.engine.installation import kernels_of
from polycast.policy import names
from polycast.policy.schemas import find_op


@pytest.fixture(params=["policy", "mapping", "path", "text"])
def policy(request, tmp_path):
    """A policy in each form that policy= takes."""
    made, path = Policy({"softmax": "fp32"}), tmp_path / "policy.toml"
    made.save(path)
    return {"policy": made, "mapping": {"softmax": "fp32"}, "path": path, "text": str(path)}[request.param]


def softmax():
    return torch.softmax(torch.ones(2, 2, dtype=torch.bfloat16), 0).dtype


def test_a_region_takes_a_policy_a_mapping_or_a_path(policy, engine):
    with polycast.autocast("cpu", policy=policy):
        assert softmax() is torch.float32
    with polycast.autocast("cpu"):
        assert softmax() is torch.bfloat16
    assert polycast.autocast("cpu", policy=policy)(softmax)() is torch.float32


def test_a_policy_is_looked_up_once(policy, monkeypatch):
    first = polycast.autocast("cpu", policy=policy)._settings.override
    for look_up in ("find_op", "find_overloads"):
        monkeypatch.setattr(names, look_up, lambda name: pytest.fail(f"{name} is looked up again"))
    assert polycast.autocast("cpu", policy=policy)._settings.override is first


def test_the_ops_of_a_policy_are_installed_once(engine, monkeypatch):
    region, calls = polycast.autocast("cpu", policy={"softmax": "fp32"}), []
    monkeypatch.setattr(installation, "kernels_of", lambda *given: calls.append(given) or kernels_of(*given))
    for count in (1, 2):
        for _ in range(3):
            with region:
                assert softmax() is torch.float32
        assert len(calls) == count
        polycast.uninstall()


@pytest.mark.skipif(sys.platform == "win32", reason="files have no time of their last change there")
def test_a_file_that_was_changed_to_one_of_its_size_and_time_is_read_again(tmp_path):
    path = tmp_path / "policy.toml"
    found = []
    for op in ("exp", "log"):
        path.write_text(f'schema = 1\n[ops]\n{op} = "fp32"\n')
        os.utime(path, ns=(1, 1))
        found.append(polycast.autocast("cpu", policy=path)._settings.override.policies)
        time.sleep(0.05)  # longer than a tick of the file system's clock
    assert found[0].keys() != found[1].keys()


def test_equal_policies_share_what_was_made_of_them():
    one, another = Policy({"mm": "fp32"}), Policy({"aten::mm": CastPolicy.FP32})
    overrides = [polycast.autocast("cpu", policy=policy)._settings.override for policy in (one, another)]
    assert overrides[0] is overrides[1]


def test_a_policy_that_says_nothing_of_the_device_makes_a_plain_region():
    policy = Policy(devices={"cuda": Policy({"mm": "fp32"})})
    assert polycast.autocast("cpu", policy=policy)._settings == polycast.autocast("cpu")._settings


def test_a_mapping_that_is_changed_is_read_again(engine):
    policy, x = {"mm": "fp32"}, torch.ones(2, 2)
    with polycast.autocast("cpu", policy=policy):
        assert torch.mm(x, x).dtype is torch.float32
    policy["mm"] = "lower_precision_fp"
    with polycast.autocast("cpu", policy=policy):
        assert torch.mm(x, x).dtype is torch.bfloat16


def test_an_optional_op_has_its_policy_once_its_library_is_loaded(engine, define):
    policy = Policy({"polycast_test::late": {"policy": "fp32", "optional": True}, "mm": "fp32"})
    assert "polycast_test::late" not in polycast.autocast("cpu", policy=policy)._settings.override.policies
    define("late(Tensor x) -> Tensor")
    with polycast.autocast("cpu", policy=policy):
        assert torch.ops.polycast_test.late(torch.ones(2).half()).dtype is torch.float32


OPS = ["polycast_test::seen", "polycast_test::seen.other", "polycast_test::plain"]
RULES = [CastPolicy.FP32, CastPolicy.LOWER_PRECISION_FP, CastPolicy.PASSTHROUGH, CastPolicy.BANNED]
WRITTEN = ["polycast_test::seen", "polycast_test::seen.other", "polycast_test::seen.default", "polycast_test::plain"]
MAPPING = st.dictionaries(st.sampled_from(WRITTEN), st.sampled_from(RULES), max_size=3)


class Region:
    """A region of the property test, and what it says in the small model."""

    def __init__(self, ops, of_device, of_another, enabled, as_mapping):
        self.ops, self.of_device, self.enabled = ops, of_device, enabled
        self.policy = ops if as_mapping else Policy(ops, {}, {"cpu": Policy(of_device), "cuda": Policy(of_another)})
        self.as_mapping = as_mapping

    def says(self, op):
        """Return the policy that this region alone gives an op: the device's part first, an overload's name first."""
        name, _, overload = op.partition(".")
        for ops in [self.ops] if self.as_mapping else [self.of_device, self.ops]:
            for key in (f"{name}.{overload or 'default'}", name):
                if key in ops:
                    return ops[key]
        return None


REGIONS = st.lists(st.builds(Region, MAPPING, MAPPING, MAPPING, st.booleans(), st.booleans()), max_size=4)


@pytest.fixture
def ops(define):
    """Ops whose result has the dtype of what their kernel saw."""
    define("seen(Tensor x) -> Tensor", "seen.other(Tensor x, float by) -> Tensor", "plain(Tensor x) -> Tensor")


@pytest.mark.slow
@pytest.mark.usefixtures("ops")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(regions=REGIONS, on_device=MAPPING, on_all=MAPPING)
def test_which_rule_decides(engine, regions, on_device, on_all):
    on_device, on_all = ({key: its for key, its in scope.items() if key in OPS[1:]} for scope in (on_device, on_all))
    registered = [polycast.register_op(op, its, device_type="cpu") for op, its in on_device.items()]
    registered += [polycast.register_op(op, its) for op, its in on_all.items()]
    x, enabled = torch.ones(2, dtype=torch.float16), False
    try:
        with contextlib.ExitStack() as stack:
            for region in regions:
                stack.enter_context(polycast.autocast("cpu", enabled=region.enabled, policy=region.policy))
                enabled = region.enabled
            for op in OPS:
                said = next((its for region in reversed(regions) if (its := region.says(op)) is not None), None)
                rule = "region's policy" if said is not None else "none"
                if said is None and op in on_device:
                    said, rule = on_device[op], "register_op for cpu"
                elif said is None and op in on_all:
                    said, rule = on_all[op], "register_op"
                arguments = (x, 2.0) if op.endswith("other") else (x,)
                explained = polycast.plugin.explain_op(find_op(op), "cpu", arguments)
                assert (explained.policy, explained.rule, explained.enabled) == (said, rule, enabled)
                if enabled and said is CastPolicy.BANNED:
                    with pytest.raises(RuntimeError) as caught:
                        find_op(op)(*arguments)
                    assert str(caught.value).splitlines()[0] == explained.refusal
                    continue
                cast = (
                    {CastPolicy.FP32: torch.float32, CastPolicy.LOWER_PRECISION_FP: torch.bfloat16} if enabled else {}
                )
                saw = find_op(op)(*arguments).dtype
                assert saw is explained.arguments[0].seen is cast.get(said, torch.float16)
    finally:
        for registration in registered:
            registration.remove()


@pytest.mark.parametrize(
    "policy",
    [Policy({"mm": "fp32"}, {"head": "fp32"}), Policy(devices={"cpu": Policy(modules={"head": "off"})})],
    ids=["general", "device"],
)
def test_a_policy_with_rules_for_modules_is_refused_and_apply_policy_is_named(policy, tmp_path):
    policy.save(tmp_path / "policy.toml")
    refused = pytest.raises(ValueError, match=r"rules for modules.*polycast\.apply_policy\(model, policy\)")
    for form in (policy, tmp_path / "policy.toml"):
        for _ in range(2):
            with refused:
                polycast.autocast("cpu", policy=form)
        with refused:
            polycast.plugin.explain_op("mm", "cpu", policy=form)


def test_a_backend_registered_after_policies_were_used_finds_its_device_unchanged(engine, hand_made):
    for name in ("ipu", "xla"):
        with polycast.autocast("cpu", policy={"mm": "fp32"}):
            pass
        hand_made(name)
        with polycast.autocast("cpu", policy={"tanh": "lower_precision_fp"}):
            assert not torch.is_autocast_enabled(name)
            assert torch.get_autocast_dtype(name).is_floating_point
