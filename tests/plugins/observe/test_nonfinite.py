"""The first op that turns finite inputs into inf or nan."""

import pytest
import torch
from torch import nn

import polycast


class Overflows(nn.Module):
    def forward(self, x):
        return (x * 100).exp()


def test_first_op_is_found_with_module_and_stack(engine):
    net = nn.Sequential(nn.ReLU(), Overflows())
    with polycast.observe(net, nonfinite="record") as seen:
        net(torch.ones(4)).log()
    found = seen.nonfinite
    assert (found.op, found.phase, found.module, found.what, found.dtype) == (
        "aten::exp",
        "forward",
        "1",
        "inf",
        "float32",
    )
    assert found.stack[-1].endswith(" forward")
    assert "test_nonfinite.py" in found.stack[-1]
    assert found.count == 1


def test_nothing_is_checked_by_default(engine):
    with polycast.observe() as seen:
        torch.zeros(4).log()
    assert seen.nonfinite is None


def test_op_of_backward_pass_is_found(engine):
    weight = torch.zeros(4, requires_grad=True)
    with polycast.observe(nonfinite="record") as seen:
        weight.sqrt().sum().backward()
    assert (seen.nonfinite.phase, seen.nonfinite.what) == ("backward", "inf")


def test_overflow_in_a_cast_is_found(engine):
    with polycast.observe(nonfinite="record") as seen, polycast.autocast("cpu", torch.float16):
        torch.mm(torch.full((2, 2), 1e5), torch.ones(2, 2))
    assert (seen.nonfinite.op, seen.nonfinite.dtype) == ("aten::mm", "float16")


def test_inf_written_by_the_program_is_ignored(engine):
    with polycast.observe(nonfinite="record") as seen:
        mask = torch.full((4, 4), float("-inf")).triu(1)
        scores = torch.ones(4, 4) + mask
        scores.masked_fill(mask == 0, float("inf"))
        torch.softmax(scores, -1)
        torch.empty(1000).view(10, 100)
    assert seen.nonfinite is None


def test_in_place_op_is_found(engine):
    x = torch.ones(4)
    with polycast.observe(nonfinite="record") as seen:
        x.mul_(2)
        x.div_(0)
        x.add_(1)
    assert (seen.nonfinite.op, seen.nonfinite.count) == ("aten::div_.Tensor", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("divisor", "what"), [(0, "inf"), (float("nan"), None)])
def test_every_dtype_is_checked(engine, dtype, divisor, what):
    with polycast.observe(nonfinite="record") as seen:
        torch.ones(5000, dtype=dtype) / torch.full((5000,), divisor, dtype=dtype)
    assert (seen.nonfinite and seen.nonfinite.what) == what


def test_nan_and_inf_are_distinguished(engine):
    with polycast.observe(nonfinite="record") as seen:
        torch.zeros(4) / torch.zeros(4)
    assert seen.nonfinite.what == "nan"


def test_error_names_op_and_module_and_restores_the_state(engine):
    net, later = nn.Sequential(Overflows(), nn.ReLU()), []
    net[1].register_forward_hook(lambda *_: later.append(1))
    with (
        pytest.raises(FloatingPointError) as raised,
        polycast.observe(net, nonfinite="raise") as seen,
        polycast.autocast("cpu"),
    ):
        net(torch.ones(4))
    assert later == []
    assert str(raised.value).startswith(
        "aten::exp in the module '0' turned finite inputs into inf (float32, in the forward pass). It was called at:\n"
    )
    assert "test_nonfinite.py" in str(raised.value)
    assert polycast.autocast_nesting("cpu") == 0
    assert seen.nonfinite.op == "aten::exp"
    torch.zeros(4).log()  # nobody looks any more


def test_error_is_raised_at_the_end_of_the_block(engine):
    with pytest.raises(FloatingPointError, match="outside of the model's modules"), polycast.observe(nonfinite="raise"):
        torch.zeros(4).log()


def test_another_exception_is_not_replaced(engine):
    def run():
        with polycast.observe(nonfinite="raise"):
            torch.zeros(4).log()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run()


@pytest.mark.parametrize(
    ("compute", "op"),
    [
        (lambda x, y: torch.log(x, out=y), "aten::log.out"),
        (lambda x, y: x.add_(1e38).mul_(10).add_(x), "aten::mul_.Tensor"),
        (lambda x, y: x.fill_(3e38).add_(x), "aten::add_.Tensor"),
        (lambda x, y: y.copy_(x).neg_().log_(), "aten::log_"),
    ],
)
def test_written_tensor_is_an_input_only_if_read(engine, compute, op):
    x, y = torch.zeros(4), torch.full((4,), float("inf"))
    with polycast.observe(nonfinite="record") as seen:
        compute(x, y)
    assert (seen.nonfinite and seen.nonfinite.op) == op


def test_inf_elsewhere_in_written_memory_is_an_input(engine):
    both = torch.tensor([[1.0], [float("inf")]])
    with polycast.observe(nonfinite="record") as seen:
        both[0].add_(both[1])
    assert seen.nonfinite is None


@pytest.mark.parametrize(
    ("dtype", "what"),
    [(torch.complex64, "inf and nan"), (torch.complex128, "inf and nan"), (torch.float8_e5m2, "inf")],
)
def test_float8_and_complex_are_checked(engine, dtype, what):
    with polycast.observe(nonfinite="record") as seen:
        torch.full((4,), 1e9).to(dtype) if what == "inf" else torch.ones(4, dtype=dtype).div(0)
    assert (seen.nonfinite.what, seen.nonfinite.dtype) == (what, str(dtype).removeprefix("torch."))


def test_strided_values_are_checked(engine):
    every = torch.zeros(8, 8)
    every[:, 1::2] = float("inf")
    with polycast.observe(nonfinite="record") as seen:
        every[:, ::2].t().cos_()
    assert seen.nonfinite is None
    with polycast.observe(nonfinite="record") as seen:
        every[:, ::2].t().sub_(2).sqrt_()
    assert seen.nonfinite.what == "nan"


def test_modes_do_not_see_the_checks(engine):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with polycast.observe(nonfinite="record") as seen, Mode() as mode:
        torch.zeros(4).log()
    assert mode.seen == ["aten.zeros.default", "aten.log.default"]
    assert (seen.nonfinite.what, seen.nonfinite.count) == ("inf", 1)


def test_error_is_raised_after_the_module_without_a_model_too(engine):
    after = []
    with pytest.raises(FloatingPointError, match=r"^aten::exp outside of the model's modules "):  # noqa: PT012, SIM117
        with polycast.observe(nonfinite="raise"):
            Overflows()(torch.ones(4))
            after.append(1)
    assert after == []
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
