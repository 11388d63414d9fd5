"""The first op that turns finite inputs into inf or nan."""

from functools import partial

import pytest
import torch
from tests.plugins.models import Defined
from tests.plugins.modes import Seen
from torch import nn

import polycast

INF, NAN = float("inf"), float("nan")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def overflows():
    return Defined(lambda self, x: (x * 100).exp())


def test_first_op_is_found_with_module_and_stack(engine):
    net = nn.Sequential(nn.ReLU(), overflows())
    with polycast.observe(net, nonfinite="record") as seen:
        net(torch.ones(4)).log()
    found = seen.nonfinite
    assert (found.op, found.phase, found.module, found.what) == ("aten::exp", "forward", "1", "inf")
    assert (found.dtype, found.count) == ("float32", 1)
    assert "test_nonfinite.py" in found.stack[-1]


def test_nothing_is_checked_by_default(engine):
    with polycast.observe() as seen:
        torch.zeros(4).log()
    assert seen.nonfinite is None


def overflow_in_a_cast():
    with polycast.autocast("cpu", torch.float16):
        torch.mm(torch.full((2, 2), 1e5), torch.ones(2, 2))


def written_by_the_program():
    mask = torch.full((4, 4), -INF).triu(1)
    scores = torch.ones(4, 4) + mask
    scores.masked_fill(mask == 0, INF)
    torch.softmax(scores, -1)
    torch.empty(1000).view(10, 100)


def elsewhere_in_written_memory():
    both = torch.tensor([[1.0], [INF]])
    both[0].add_(both[1])


def strided():
    """Return every other column of a tensor, whose other columns are infinite."""
    every = torch.zeros(8, 8)
    every[:, 1::2] = INF
    return every[:, ::2].t()


def divided(dtype, divisor):
    torch.ones(5000, dtype=dtype) / torch.full((5000,), divisor, dtype=dtype)


FOUND = {
    "in the backward pass": (
        lambda: torch.zeros(4, requires_grad=True).sqrt().sum().backward(),
        {"phase": "backward", "what": "inf"},
    ),
    "in a cast": (overflow_in_a_cast, {"op": "aten::mm", "dtype": "float16"}),
    "in place": (lambda: torch.ones(4).mul_(2).div_(0).add_(1), {"op": "aten::div_.Tensor", "count": 1}),
    "in place, in a list": (lambda: torch._foreach_div_([torch.ones(4), torch.zeros(4)], 0.0), {"what": "inf"}),
    "nan": (lambda: torch.zeros(4) / torch.zeros(4), {"what": "nan"}),
    "strided": (lambda: strided().sub_(2).sqrt_(), {"what": "nan"}),
    "float8": (lambda: torch.full((4,), 1e9).to(torch.float8_e5m2), {"what": "inf", "dtype": "float8_e5m2"}),
    **{
        str(dtype): (partial(divided, dtype, 0), {"what": what, "dtype": str(dtype)[6:]})
        for what, dtypes in (("inf", FLOATS), ("inf and nan", (torch.complex64, torch.complex128)))
        for dtype in dtypes
    },
    # A tensor that an op writes to counts as an input only if the op reads it.
    "out": (lambda: torch.log(torch.zeros(4), out=torch.full((4,), INF)), {"op": "aten::log.out"}),
    "in place, later": (lambda: torch.zeros(4).add_(1e38).mul_(10).add_(1), {"op": "aten::mul_.Tensor"}),
    "filled": (lambda: (x := torch.zeros(4)).fill_(3e38).add_(x), {"op": "aten::add_.Tensor"}),
    "copied": (lambda: torch.full((4,), INF).copy_(torch.zeros(4)).neg_().log_(), {"op": "aten::log_"}),
    # Find no op where a value that is not finite was given.
    "written by the program": (written_by_the_program, {}),
    "elsewhere in written memory": (elsewhere_in_written_memory, {}),
    "given in a list": (lambda: torch._foreach_mul_([torch.ones(4), torch.full((4,), INF)], 2.0), {}),
    "beside strided values": (lambda: strided().cos_(), {}),
    **{f"given {dtype}": (partial(divided, dtype, NAN), {}) for dtype in FLOATS},
}


def test_op_is_found(engine, subtests):
    for name, (compute, fields) in FOUND.items():
        with subtests.test(name):
            with polycast.observe(nonfinite="record") as seen:
                compute()
            assert (seen.nonfinite is not None) == bool(fields)
            assert {field: getattr(seen.nonfinite, field) for field in fields} == fields


def test_error_names_op_and_module_and_restores_the_state(engine):
    net, later = nn.Sequential(overflows(), nn.ReLU()), []
    net[1].register_forward_hook(lambda *_: later.append(1))
    raises = pytest.raises(FloatingPointError)
    with raises as raised, polycast.observe(net, nonfinite="raise") as seen, polycast.autocast("cpu"):
        net(torch.ones(4))
    assert later == []
    assert str(raised.value).startswith(
        "aten::exp in the module '0' turned finite inputs into inf (float32, in the forward pass). It was called at:\n"
    )
    assert "test_nonfinite.py" in str(raised.value)
    assert polycast.autocast_nesting("cpu") == 0
    assert seen.nonfinite.op == "aten::exp"
    torch.zeros(4).log()  # nobody looks any more


def test_error_is_raised_after_the_module_without_a_model_too(engine):
    after = []
    with pytest.raises(FloatingPointError, match=r"^aten::exp outside of the model's modules "):  # noqa: PT012, SIM117
        with polycast.observe(nonfinite="raise"):
            overflows()(torch.ones(4))
            after.append(1)
    assert after == []
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [(None, FloatingPointError, "outside of the model's modules"), (ValueError("mine"), ValueError, "mine")],
    ids=["none", "another"],
)
def test_error_is_raised_at_the_end_of_the_block_unless_there_is_another(engine, error, kind, text):
    def run():
        with polycast.observe(nonfinite="raise"):
            torch.zeros(4).log()
            if error is not None:
                raise error

    with pytest.raises(kind, match=text):
        run()


def test_modes_do_not_see_the_checks(engine):
    with polycast.observe(nonfinite="record") as seen, Seen() as mode:
        torch.zeros(4).log()
    assert mode.ops == [torch.ops.aten.zeros.default, torch.ops.aten.log.default]
    assert (seen.nonfinite.what, seen.nonfinite.count) == ("inf", 1)
