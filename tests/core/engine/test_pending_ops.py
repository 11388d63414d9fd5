"""Ops of a table that are defined later."""

import re

import pytest
import torch

import polycast
from polycast import CastPolicy
from polycast.engine.installation import kernels_of
from polycast.engine.state import ready

LOWER = CastPolicy.LOWER_PRECISION_FP
NAME = "polycast_test::scale"
pytestmark = pytest.mark.usefixtures("engine")


def test_an_op_of_a_table_that_appears_later_is_cast_from_the_next_region_on(hand_made, define):
    hand_made("cpu", policies={NAME: LOWER, "aten::mm": LOWER, "aten::of_another_version": LOWER})
    with polycast.autocast("cpu"):
        assert kernels_of("cpu").pending == {NAME}
        assert "cpu" not in ready
        define("scale(Tensor x) -> Tensor")
        assert torch.ops.polycast_test.scale(torch.ones(2)).dtype is torch.float32
        with polycast.autocast("cpu", torch.bfloat16):
            assert torch.ops.polycast_test.scale(torch.ones(2)).dtype is torch.bfloat16
    assert kernels_of("cpu").pending == frozenset()
    assert "cpu" in ready


def test_a_table_that_awaits_nothing_is_not_looked_at_again():
    with polycast.autocast("cpu"):
        assert "cpu" in ready
    polycast.uninstall()
    assert "cpu" not in ready


def test_an_op_that_appears_and_cannot_have_its_policy_says_so_at_the_next_region(hand_made, define):
    hand_made("cpu", policies={"polycast_test::late_": LOWER})
    with polycast.autocast("cpu"):
        define("late_(Tensor(a!) x) -> Tensor(a!)")
    text = (
        "policies of the backend for 'cpu': 'polycast_test::late_' writes to its inputs: in-place and out= variants "
        "are never cast, so LOWER_PRECISION_FP cannot hold"
    )
    with pytest.raises(polycast.errors.InvalidBackendError, match=f"^{re.escape(text)}$"), polycast.autocast("cpu"):
        pass
    assert polycast.autocast_nesting("cpu") == 0
