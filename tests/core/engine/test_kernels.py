"""The kernels: every policy on every kind of device, installing and uninstalling."""

import re

import pytest
import torch
from torch.nn import functional as F

import polycast
from polycast import CastPolicy
from polycast.engine.installation import kernels_of, torch_ops
from polycast.policy.schemas import COMPOSED_OPS

pytestmark = pytest.mark.usefixtures("engine")

FAKE_DEVICES = ("cuda", "xpu", "privateuseone", "hpu")
REDUCED = (torch.float16, torch.bfloat16)


@pytest.fixture(params=["cpu", *FAKE_DEVICES])
def device(request, hand_made):
    """A device type with the standard table: real on the CPU, on fake tensors elsewhere."""
    if request.param != "cpu":
        request.getfixturevalue("fake")
    hand_made(request.param)
    polycast.install(request.param)
    return request.param


@pytest.fixture(params=REDUCED, ids=str)
def fast(request, device):
    """Enable autocast with a dtype."""
    with polycast.autocast(device, request.param):
        yield request.param


def tensor(device, dtype=torch.float32, shape=(4, 4)):
    return torch.ones(shape, device=device, dtype=dtype)


def test_lower_precision_fp_and_fp32_cast_every_eligible_input(device, fast, subtests):
    single = tensor(device)
    for dtype in [torch.float32, *REDUCED]:
        with subtests.test(dtype=dtype):
            x = tensor(device, dtype)
            assert torch.mm(x, single).dtype is fast
            assert F.linear(x, single, tensor(device, shape=(4,))).dtype is fast
            assert torch.exp(x).dtype is torch.float32
            assert F.mse_loss(x, single).dtype is torch.float32


def test_fp32_set_opt_dtype_gives_float32_unless_the_caller_chose(device, fast):
    x = tensor(device, fast)
    assert torch.softmax(x, 0).dtype is torch.float32
    assert torch.softmax(x, 0, dtype=torch.float16).dtype is torch.float16
    assert torch.sum(x, dim=0, keepdim=True).dtype is torch.float32
    assert torch.cumsum(x, 0).dtype is torch.float32
    assert torch.prod(tensor(device, torch.int32), 0).dtype is torch.int64
    assert torch.sum(tensor(device, torch.float64)).dtype is torch.float64


def test_fp32_append_dtype_calls_the_overload_with_a_dtype(device, fast):
    x = tensor(device, fast)
    assert torch.ops.aten.norm.Scalar(x).dtype is torch.float32
    assert torch.ops.aten.norm.Scalar(x, 1).dtype is torch.float32
    assert torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0], True).shape == (1, 4)
    assert torch.ops.aten.norm.ScalarOpt_dim(x, None, [0]).dtype is torch.float32
    assert torch.ops.aten.norm.Scalar(tensor(device, torch.float64)).dtype is torch.float64


PROMOTED = [
    ((torch.float16, torch.float32), torch.float32),
    ((torch.float16, torch.bfloat16), torch.float32),
    ((torch.float16, torch.float16), torch.float16),
    ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
    ((torch.float32, torch.float32), torch.float32),
    ((torch.float64, torch.float64), torch.float64),
]


def test_promote_takes_float32_for_different_dtypes_and_leaves_equal_ones(device, fast, subtests):
    for dtypes, expected in PROMOTED:
        with subtests.test(dtypes=dtypes, expected=expected):
            a, b = (tensor(device, dtype, (4,)) for dtype in dtypes)
            assert torch.dot(a, b).dtype is expected
            assert torch.addcmul(a, b, b).dtype is expected


def test_a_banned_op_raises_and_says_what_to_use(device, fast):
    text = r"^aten::binary_cross_entropy is unsafe to autocast.*binary_cross_entropy_with_logits"
    with pytest.raises(RuntimeError, match=text):
        F.binary_cross_entropy(tensor(device), tensor(device))


def test_a_banned_op_without_a_remedy_says_what_helps_always(hand_made):
    hand_made("cpu", policies={"aten::mm": CastPolicy.BANNED})
    with polycast.autocast("cpu"), pytest.raises(RuntimeError, match="in a region with enabled=False, on float32"):
        torch.mm(tensor("cpu"), tensor("cpu"))


def test_float64_integers_and_other_devices_are_left_alone(device, fast):
    assert torch.mm(tensor(device, torch.float64), tensor(device, torch.float64)).dtype is torch.float64
    assert torch.mm(tensor(device, torch.int64), tensor(device, torch.int64)).dtype is torch.int64
    assert torch.mm(tensor("meta"), tensor("meta")).dtype is torch.float32


def test_in_place_and_out_variants_are_not_cast(device, fast):
    x = tensor(device)
    assert torch.mm(x, x, out=tensor(device)).dtype is torch.float32
    assert tensor(device).addmm_(x, x).dtype is torch.float32
    assert torch.exp(tensor(device, fast), out=tensor(device, fast)).dtype is fast


def test_ops_outside_the_table_and_of_a_disabled_region_pass_by(device, fast):
    assert torch.relu(tensor(device)).dtype is torch.float32
    assert (tensor(device, fast) + tensor(device, fast)).dtype is fast
    with polycast.autocast(device, enabled=False):
        assert torch.mm(tensor(device), tensor(device)).dtype is torch.float32


def test_only_the_regions_device_is_cast(hand_made, fake):
    hand_made("cuda")
    polycast.install("xpu")
    with polycast.autocast("cuda"):
        assert torch.mm(tensor("cuda"), tensor("cuda")).dtype is torch.float16
        assert torch.mm(tensor("xpu"), tensor("xpu")).dtype is torch.float32


@pytest.fixture
def probe(define):
    """An op of another namespace, which records whether autocast is on for the CPU and for hpu where it runs."""

    def kernel(x):
        seen.append([*map(torch.is_autocast_enabled, ("cpu", "hpu"))])
        return x.clone()

    seen = []
    define("probe(Tensor x) -> Tensor", kernel=kernel)
    return seen


def test_an_op_of_another_namespace_is_cast_with_autocast_off_for_its_device_only(hand_made, probe):
    hand_made("cpu", policies={"polycast_test::probe": CastPolicy.LOWER_PRECISION_FP})
    hand_made("hpu")
    with polycast.autocast("cpu", torch.bfloat16), polycast.autocast("hpu"):
        assert torch.ops.polycast_test.probe(tensor("cpu")).dtype is torch.bfloat16
    polycast.uninstall()
    assert probe == [[False, True]]


@pytest.mark.slow
def test_install_and_uninstall_give_torch_its_own_kernels_back():
    mixed = [tensor("cpu", torch.float16), tensor("cpu", torch.bfloat16)]
    before = {device: torch_ops(device) for device in ("cpu", "cuda", "xpu")}
    held = []  # the kernels of a device would go with its object, too
    for _ in range(5):
        for device in before:
            polycast.install(device)
            held.append(kernels_of(device))
        with torch.autocast("cpu"):
            assert torch.cat(mixed).dtype is torch.float32
        polycast.uninstall("cpu")
        polycast.uninstall()
        with torch.autocast("cpu"), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.cat(mixed)
        assert {device: torch_ops(device) for device in before} == before


def test_ops_that_this_torch_lacks_are_skipped(hand_made, monkeypatch):
    table = frozenset({"aten::of_another_version", "aten::mv"})
    monkeypatch.setattr("polycast.registry.backend.MATCHED_ON_ALL_DEVICES", table)
    hand_made("hpu", policies={"aten::of_yet_another": CastPolicy.FP32, "aten::mm": CastPolicy.FP32})
    assert kernels_of("hpu").ops == {"aten::mm", "aten::mv", *COMPOSED_OPS}


def test_an_override_leaves_a_composite_op_as_it_was_outside_it():
    x = torch.ones(2, 4, 4)
    with polycast.autocast("cpu", policy={"aten::einsum": CastPolicy.FP32, "aten::relu": CastPolicy.FP32}):
        assert torch.einsum("bij,bjk->bik", x, x).dtype is torch.float32
    with polycast.autocast("cpu"):
        assert torch.einsum("bij,bjk->bik", x, x).dtype is torch.bfloat16
        assert torch.relu(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_that_requires_grad_is_cast():
    nested = torch.nested.nested_tensor([torch.ones(4, 5)] * 2, requires_grad=True)
    other = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    for mode in (torch.no_grad, torch.no_grad, torch.enable_grad):
        with mode(), polycast.autocast("cpu"):
            assert torch.bmm(other, nested).dtype is torch.bfloat16


def test_kernels_in_use_are_not_taken_away(in_thread, hand_made):
    text = "polycast's kernels for 'cpu' are in use: 1 region is open, counting all threads. Leave them first."
    with polycast.autocast("cpu"):
        for attempt in (polycast.uninstall, lambda: polycast.uninstall("cpu"), lambda: hand_made("cpu")):
            with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
                in_thread(attempt)
        assert torch.mm(tensor("cpu"), tensor("cpu")).dtype is torch.bfloat16
        assert polycast.backends()["cpu"].distribution == "polycast"
    polycast.uninstall()


def test_a_backend_in_use_is_not_unregistered(hand_made):
    backend, refusal = hand_made("cpu"), "^polycast's kernels for 'cpu' are in use: 2 regions are open"
    with polycast.autocast("cpu"), polycast.autocast("cpu"), pytest.raises(RuntimeError, match=refusal):
        polycast.plugin.unregister_backend("cpu")
    assert polycast.plugin.get_backend("cpu") is backend


def test_ops_of_an_override_have_their_kernels_after_a_change_of_backend(hand_made):
    x = tensor("cpu", torch.bfloat16)
    region = polycast.autocast("cpu", torch.bfloat16, policy={"aten::add.Tensor": CastPolicy.FP32})
    for change in (lambda: hand_made("cpu"), polycast.uninstall, lambda: polycast.plugin.unregister_backend("cpu")):
        with region:
            assert torch.add(x, x).dtype is torch.float32
        change()
    suspended = polycast.autocast("cpu", torch.bfloat16)
    with region, suspended:  # the inner region has no policy of its own, and the enclosing one applies
        assert torch.add(x, x).dtype is torch.float32
