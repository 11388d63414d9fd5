"""Policies for ops of other libraries: by register_op, until they are removed, and by tables, also before the ops."""

import re

import pytest
import torch

import polycast
from polycast import CastPolicy
from polycast.engine.installation import kernels_of
from polycast.engine.state import ready
from polycast.plugin import find_op
from polycast.policy.cast_policy import registrations
from polycast.policy.schemas import COMPOSED_OPS

LOWER = CastPolicy.LOWER_PRECISION_FP
NAME = "polycast_test::scale"
pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def scale(define):
    """An op that torch's autocast does not know."""
    library = define("scale(Tensor x, float by=2.0) -> Tensor")
    torch.library.register_fake(NAME, lambda x, by=2.0: torch.empty_like(x), lib=library)
    return torch.ops.polycast_test.scale


def dtype_in_region(op, device_type="cpu", dtype=torch.float32, fast=torch.bfloat16):
    with polycast.autocast(device_type, fast):
        return op(torch.ones(2, device=device_type, dtype=dtype)).dtype


@pytest.mark.parametrize("form", ["overload", "packet", "name"])
def test_an_op_is_cast_in_regions_and_not_outside(scale, registered, form):
    registered({"overload": scale.default, "packet": scale, "name": NAME}[form], LOWER)
    assert dtype_in_region(scale) is torch.bfloat16
    assert scale(torch.ones(2)).dtype is torch.float32
    with polycast.autocast("cpu", enabled=False):
        assert scale(torch.ones(2)).dtype is torch.float32


def test_an_op_that_is_registered_in_a_region_is_cast_at_once(scale):
    with polycast.autocast("cpu"):
        x = torch.ones(2)
        assert scale(x).dtype is torch.float32
        registration = polycast.register_op(scale, LOWER)
        assert scale(x).dtype is torch.bfloat16
    registration.remove()


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "mps", "hpu"])
@pytest.mark.parametrize("scope", [None, "cuda:0"])
def test_all_devices_have_it_or_one_also_if_the_backend_comes_later(
    scale, registered, hand_made, fake, device_type, scope
):
    registered(scale, LOWER, device_type=scope)
    hand_made(device_type)
    expected = torch.bfloat16 if scope is None or device_type == "cuda" else torch.float32
    assert dtype_in_region(scale, device_type) is expected


def test_it_goes_before_the_table_which_stays_as_it_is(registered):
    def dtype():
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    table = dict(polycast.plugin.get_backend("cpu").policies)
    with polycast.autocast("cpu"):
        registration = registered("aten::mm", CastPolicy.FP32, device_type="cpu")
        assert dtype() is torch.float32
    polycast.uninstall()
    assert polycast.autocast("cpu")(dtype)() is torch.float32
    assert dict(polycast.plugin.get_backend("cpu").policies) == table
    registration.remove()
    assert polycast.autocast("cpu")(dtype)() is torch.bfloat16


@pytest.fixture
def many(define):
    """An op with overloads, one of which writes."""
    define(
        "many(Tensor x) -> Tensor",
        "many.other(Tensor x, float by) -> Tensor",
        "many.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    )
    return torch.ops.polycast_test.many


def test_a_packet_means_its_overloads_except_those_that_write(many, registered):
    assert registered(many, LOWER).ops == ("polycast_test::many", "polycast_test::many.other")
    with polycast.autocast("cpu"):
        assert many(torch.ones(2)).dtype is many(torch.ones(2), 2.0).dtype is torch.bfloat16
        assert many(torch.ones(2), out=torch.ones(2)).dtype is torch.float32


@pytest.mark.parametrize("name", ["sum", "aten::sum", torch.ops.aten.sum])
def test_a_name_is_read_as_in_a_policy_and_the_policy_may_be_its_name(registered, name):
    registration = registered(name, "passthrough")
    assert set(registration.ops) == {"aten::sum", "aten::sum.dim_IntList"}
    assert registration.policy is CastPolicy.PASSTHROUGH


def test_banning_a_packet_bans_what_writes_too(many, registered):
    assert "polycast_test::many.out" in registered(many, CastPolicy.BANNED).ops
    refusal = pytest.raises(RuntimeError, match=r"^polycast_test::many\.out is unsafe to autocast")
    with polycast.autocast("cpu"), refusal:
        many(torch.ones(2), out=torch.ones(2))


def test_as_a_context_manager_it_is_removed_on_exit(scale):
    with polycast.register_op(scale, LOWER) as registration:
        assert (registration.ops, registration.policy, registration.device_type) == ((NAME,), LOWER, None)
        assert dtype_in_region(scale) is torch.bfloat16
    assert dtype_in_region(scale) is torch.float32
    backend = polycast.plugin.get_backend("cpu")
    assert kernels_of("cpu").ops == {*backend.policies, *filter(find_op, backend.matched_ops), *COMPOSED_OPS}
    registration.remove()  # again


def test_it_is_not_removed_while_a_region_is_open(scale, registered):
    registration = registered(scale, LOWER)
    with polycast.autocast("cpu"):
        with pytest.raises(RuntimeError, match="^polycast's kernels for 'cpu' are in use: 1 region is open"):
            registration.remove()
        assert scale(torch.ones(2)).dtype is torch.bfloat16
    assert dtype_in_region(scale) is torch.bfloat16


def test_the_same_again_holds_until_the_last_is_removed(scale, registered):
    first, second = registered(scale, LOWER), registered(scale, LOWER)
    with polycast.autocast("cpu"):
        first.remove()  # nothing changes, so that no kernel is in the way
    assert dtype_in_region(scale) is torch.bfloat16
    second.remove()
    assert dtype_in_region(scale) is torch.float32


@pytest.mark.parametrize(("device_type", "scope"), [(None, "all devices"), ("cpu", "'cpu'")])
def test_another_policy_for_the_same_op_and_device_is_refused(scale, registered, device_type, scope):
    registration = registered(scale, LOWER, device_type=device_type)
    text = (
        f"'{NAME}' is registered as LOWER_PRECISION_FP for {scope}, and cannot be FP32 there too. Call remove() on "
        "what polycast.register_op() returned for it first."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        polycast.register_op(scale, CastPolicy.FP32, device_type=device_type)
    assert dtype_in_region(scale) is torch.bfloat16
    registration.remove()
    registered(scale, CastPolicy.FP32, device_type=device_type)
    assert dtype_in_region(scale, dtype=torch.half) is torch.float32


NO_OP = (
    "expected a name such as 'mm' or 'acme::scale', an OpOverload such as torch.ops.aten.mm.default, an "
    "OpOverloadPacket such as torch.ops.aten.mm, or what torch.library.custom_op returned; got "
)
MM = torch.ops.aten.mm.default
PROBLEMS = [
    *((op, LOWER, None, TypeError, NO_OP) for op in (None, 7, torch.mm, torch.ops.polycast_test, LOWER)),
    ("acme::absent", LOWER, None, ValueError, f"this torch ({torch.__version__}) has no op 'acme::absent': load the l"),
    (MM, "fp23", None, ValueError, "the policy of 'mm.default' must be a CastPolicy or the name of one, got 'fp"),
    (torch.ops.aten.mm.out, LOWER, None, ValueError, "'aten::mm.out' is an out= variant, whose inputs are never cast"),
    (MM, LOWER, "nonsense", RuntimeError, "Invalid device string: 'nonsense'"),
    (MM, LOWER, "meta", RuntimeError, "torch has no Autocast dispatch key for 'meta': no policy can be registered"),
    (MM, LOWER, 0, ValueError, "Expected `device_type` of type `str`, got: `<class 'int'>`"),
]


def test_what_cannot_be_registered_is_refused_and_nothing_changes(subtests):
    polycast.install("cpu")
    before = kernels_of("cpu").ops
    for op, policy, device_type, error, text in PROBLEMS:
        with subtests.test(text):
            with pytest.raises(error, match=f"^{re.escape(text)}"):
                polycast.register_op(op, policy, device_type=device_type)
            assert (kernels_of("cpu").ops, registrations) == (before, [])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_casts_as_in_eager_mode(scale, registered, backend):
    registered(scale, LOWER)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: scale(x * 1.0) + 1, backend=backend, fullgraph=True)
    assert dtype_in_region(compiled) is torch.bfloat16
    assert compiled(torch.ones(2)).dtype is torch.float32


def test_what_torch_library_returned_is_an_op_whose_gradients_come_back_in_the_dtype_of_the_input(registered):
    @torch.library.custom_op("polycast_test::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_autograd(
        lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert registered(cube, LOWER).ops == ("polycast_test::cube",)
    x = torch.full((2,), 3.0, requires_grad=True)
    with polycast.autocast("cpu"):
        y = cube(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, x.grad.tolist()) == (torch.bfloat16, torch.float32, [27.0, 27.0])


def test_an_op_that_is_redefined_and_registered_again_is_cast_by_its_new_schema(define, registered):
    with torch.library._scoped_library("polycast_test", "FRAGMENT") as library:
        library.define("again(float by, Tensor x) -> Tensor")
        registered(torch.ops.polycast_test.again, LOWER)
        polycast.install("cpu")
    define("again(Tensor x) -> Tensor")
    registered(torch.ops.polycast_test.again, LOWER)
    assert dtype_in_region(torch.ops.polycast_test.again) is torch.bfloat16


@pytest.fixture(params=["custom_op", "library"])
def of_torch(request, define):
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


def test_it_goes_before_the_registration_with_torch_and_that_is_back_afterwards(of_torch):
    assert dtype_in_region(of_torch) is torch.float16
    with polycast.register_op(of_torch, LOWER):
        assert dtype_in_region(of_torch) is compiled_dtype(of_torch, polycast.autocast) is torch.bfloat16
        with torch.autocast("cpu"):
            assert of_torch(torch.ones(2)).dtype is torch.bfloat16
    assert dtype_in_region(of_torch) is torch.float16
    polycast.uninstall()
    with torch.autocast("cpu"):
        assert of_torch(torch.ones(2)).dtype is torch.float16


def test_the_registration_with_torch_is_back_for_compiled_functions_too(of_torch, engine, request):
    if engine == "reference" and request.node.callspec.params["of_torch"] == "custom_op":
        reason = (
            "where a dispatch mode is active, torch calls the Python kernel that was registered last, also if removed"
        )
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    with polycast.register_op(of_torch, LOWER):
        assert dtype_in_region(of_torch) is torch.bfloat16
    assert compiled_dtype(of_torch, polycast.autocast) is compiled_dtype(of_torch, torch.autocast) is torch.float16


def test_an_op_of_a_table_that_appears_later_is_cast_from_the_next_region_on(hand_made, define):
    hand_made("cpu", policies={NAME: LOWER, "aten::mm": LOWER, "aten::of_another_version": LOWER})
    with polycast.autocast("cpu"):
        assert kernels_of("cpu").pending == {NAME}
        assert "cpu" not in ready
        define("scale(Tensor x) -> Tensor")
        assert torch.ops.polycast_test.scale(torch.ones(2)).dtype is torch.float32
        assert dtype_in_region(torch.ops.polycast_test.scale) is torch.bfloat16
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
