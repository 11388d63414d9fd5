"""Higher-order ops work in regions on each device: torch lets them fall through the Autocast keys of three only."""

import pytest
import torch
from torch._higher_order_ops.map import map_impl
from torch._ops import _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS as KEYS
from torch._ops import HigherOrderOperator, _higher_order_ops
from torch.nn.attention.flex_attention import flex_attention

import polycast

KEY = torch._C._parse_dispatch_key("AutocastMPS")


@pytest.fixture
def mps(hand_made, fake):
    """Make regions on mps possible, and fake tensors there."""
    return hand_made("mps", policies={"aten::mm": polycast.CastPolicy.LOWER_PRECISION_FP})


def state():
    return {
        name: (op.non_fallthrough_keys.has(KEY), KEY in op.py_kernels, KEY in op._dispatch_cache)
        for name, op in _higher_order_ops.items()
    }


def test_all_of_them_can_be_called_and_uninstall_leaves_them_as_they_were(engine, mps):
    before, keys = state(), list(KEYS)
    with polycast.autocast("mps"):
        seen = {name: falls or has for name, (keeps, has, _) in state().items() for falls in (not keeps,)}
    polycast.uninstall()
    assert not all(has or not keeps for keeps, has, _ in before.values())
    assert all(seen.values())
    assert (state(), KEYS) == (before, keys)


def test_an_op_that_is_defined_later_falls_through_until_uninstall(engine, mps):
    class Later(HigherOrderOperator):
        def __call__(self, x):
            return super().__call__(x)

    with polycast.autocast("mps"):
        later = Later("polycast_test_later")
    try:
        assert not later.non_fallthrough_keys.has(KEY)
        polycast.uninstall()
        assert later.non_fallthrough_keys.has(KEY)
    finally:
        del _higher_order_ops["polycast_test_later"]


def test_a_kernel_that_a_library_has_at_the_key_is_kept(engine, mps):
    op = _higher_order_ops["cond"]

    @op.py_impl(KEY)
    def kernel(*args):
        return "theirs"

    try:
        with polycast.autocast("mps"):
            assert op.py_kernels[KEY] is kernel
        polycast.uninstall()
        assert op.py_kernels[KEY] is kernel
    finally:
        del op.py_kernels[KEY]
        op._dispatch_cache.clear()


def test_the_ops_inside_are_autocast(engine, mps):
    with polycast.autocast("mps"):
        x = torch.randn(3, 4, 4, device="mps")
        (y,) = map_impl(lambda row: (row @ row,), (x,), ())
    assert (y.dtype, y.device.type) == (torch.float16, "mps")


def test_flex_attention_casts_to_the_fast_dtype_with_autocast_off(engine, mps, monkeypatch):
    given = []
    op = _higher_order_ops["flex_attention"]
    with polycast.autocast("mps", torch.bfloat16):
        monkeypatch.setattr(
            type(op),
            "__call__",
            lambda self, *args: given.append((args, torch.ones(2, 2, device="mps").mm(torch.ones(2, 2, device="mps")))),
        )
        half, double = torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.float64)
        op.py_kernels[KEY](torch.ones(1), half, double, "score_mod")
    ((args, product),) = given
    assert [each.dtype for each in args[:3]] == [torch.bfloat16, torch.bfloat16, torch.float64]
    assert (args[3], product.dtype) == ("score_mod", torch.float32)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_keys_of_torch_are_left_alone(engine):
    before = list(KEYS)
    with polycast.autocast("cpu"):
        y = flex_attention(*(torch.randn(1, 2, 16, 8) for _ in range(3)))
        assert before == KEYS
    assert y.dtype is torch.bfloat16
