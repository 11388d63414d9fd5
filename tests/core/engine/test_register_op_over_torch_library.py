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
