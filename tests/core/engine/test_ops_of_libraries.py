"""Ops of tables that are defined later, and register_op for ops that torch.library.register_autocast has registered."""

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


def dtype_in_region(op, device_type="cpu", dtype=torch.float32, fast=torch.bfloat16):
    with polycast.autocast(device_type, fast):
        return op(torch.ones(2, device=device_type, dtype=dtype)).dtype


@pytest.fixture(params=["custom_op", "library"])
def registered(request, define):
    """An op registered with torch.library, for which the CPU's autocast casts to float16."""
    if request.param == "library":
        library = define("registered_library(Tensor x) -> Tensor")
        torch.library.register_fake("polycast_test::registered_library", torch.empty_like, lib=library)
        torch.library.register_autocast("polycast_test::registered_library", "cpu", torch.float16, lib=library)
        yield torch.ops.polycast_test.registered_library.default
        return

    @torch.library.custom_op("polycast_test::registered", mutates_args=())
    def registered(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    registered.register_fake(torch.empty_like)
    registered.register_autocast("cpu", torch.float16)
    yield torch.ops.polycast_test.registered.default
    registered._lib._destroy()


def compiled_dtype(op, region):
    torch._dynamo.reset()
    with region("cpu"):
        return torch.compile(lambda x: op(x), backend="aot_eager")(torch.ones(2)).dtype


def test_it_goes_before_the_registration_with_torch_and_that_is_back_afterwards(registered):
    assert dtype_in_region(registered) is torch.float16
    with polycast.register_op(registered, LOWER):
        assert dtype_in_region(registered) is compiled_dtype(registered, polycast.autocast) is torch.bfloat16
        with torch.autocast("cpu"):
            assert registered(torch.ones(2)).dtype is torch.bfloat16
    assert dtype_in_region(registered) is torch.float16
    polycast.uninstall()
    with torch.autocast("cpu"):
        assert registered(torch.ones(2)).dtype is torch.float16


def test_the_registration_with_torch_is_back_for_compiled_functions_too(registered, engine, request):
    if engine == "reference" and request.node.callspec.params["registered"] == "custom_op":
        reason = (
            "where a dispatch mode is active, torch calls the Python kernel that was registered last, also if removed"
        )
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    with polycast.register_op(registered, LOWER):
        assert dtype_in_region(registered) is torch.bfloat16
    assert compiled_dtype(registered, polycast.autocast) is compiled_dtype(registered, torch.autocast) is torch.float16


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
        "policies of the backend for 'cpu': 'polycast_test::late_' has no tensors but those that it writes, which are "
        "never cast"
    )
    with pytest.raises(polycast.errors.InvalidBackendError, match=f"^{re.escape(text)}$"), polycast.autocast("cpu"):
        pass
    assert polycast.autocast_nesting("cpu") == 0
