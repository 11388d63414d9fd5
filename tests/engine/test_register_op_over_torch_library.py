"""register_op for ops that torch.library.register_autocast has registered too."""

import pytest
import torch

import polycast
from polycast import CastPolicy

LOWER = CastPolicy.LOWER_PRECISION_FP
pytestmark = pytest.mark.usefixtures("engine")


def dtype_in_region(op, device_type="cpu", dtype=torch.float32, fast=torch.bfloat16):
    with polycast.autocast(device_type, fast):
        return op(torch.ones(2, device=device_type, dtype=dtype)).dtype


@pytest.fixture(params=["custom_op", "library"])
def told(request, define):
    """An op of which torch.library was told that the CPU's autocast casts to float16."""
    if request.param == "library":
        library = define("told_library(Tensor x) -> Tensor")
        torch.library.register_fake("polycast_test::told_library", torch.empty_like, lib=library)
        torch.library.register_autocast("polycast_test::told_library", "cpu", torch.float16, lib=library)
        yield torch.ops.polycast_test.told_library.default
        return

    @torch.library.custom_op("polycast_test::told", mutates_args=())
    def told(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    told.register_fake(torch.empty_like)
    told.register_autocast("cpu", torch.float16)
    yield torch.ops.polycast_test.told.default
    told._lib._destroy()


def compiled_dtype(op, region):
    torch._dynamo.reset()
    with region("cpu"):
        return torch.compile(lambda x: op(x), backend="aot_eager")(torch.ones(2)).dtype


def test_it_goes_before_what_torch_was_told_and_that_is_back_afterwards(told):
    assert dtype_in_region(told) is torch.float16
    with polycast.register_op(told, LOWER):
        assert dtype_in_region(told) is compiled_dtype(told, polycast.autocast) is torch.bfloat16
        with torch.autocast("cpu"):
            assert told(torch.ones(2)).dtype is torch.bfloat16
    assert dtype_in_region(told) is torch.float16
    polycast.uninstall()
    with torch.autocast("cpu"):
        assert told(torch.ones(2)).dtype is torch.float16


def test_what_torch_was_told_is_back_for_compiled_functions_too(told, engine, request):
    if engine == "reference" and request.node.callspec.params["told"] == "custom_op":
        reason = (
            "where a dispatch mode is active, torch calls the Python kernel that was registered last, also if removed"
        )
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    with polycast.register_op(told, LOWER):
        assert dtype_in_region(told) is torch.bfloat16
    assert compiled_dtype(told, polycast.autocast) is compiled_dtype(told, torch.autocast) is torch.float16
