"""The CPU's tables for elementwise ops: the bits of torch's kernels, for every number."""

import pytest
import torch
import torch.nn.functional as F

from polycast_plugins.quantize.cpu.few_rows import few_rows_availability
from polycast_plugins.quantize.cpu.table_lookup import lookup_kernels

AVAILABLE = few_rows_availability()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no kernels here: {AVAILABLE.reason}")
FUNCTIONS = {
    "gelu": (F.gelu, ("none",)),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), ("tanh",)),
    "mish": (F.mish, ()),
    "sigmoid": (torch.sigmoid, ()),
    "silu": (F.silu, ()),
    "tanh": (torch.tanh, ()),
}


@pytest.fixture(params=FUNCTIONS)
def function(request):
    """Return a function of torch's, and the function by the kernel."""
    of_torch, others = FUNCTIONS[request.param]
    kernel = lookup_kernels()[f"aten::{request.param.partition(' ')[0]}"]
    return of_torch, lambda x: kernel.operator(x, *others, x, x.dtype)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def numbers(request):
    """Return all numbers of a fast dtype, nan, infinities and denormal numbers included."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(request.param)


X = torch.linspace(-2, 2, 64).bfloat16()


def bits(tensor):
    return tensor.view(torch.int16)


def test_every_number_has_the_result_of_torch(function, numbers):
    of_torch, by_kernel = function
    assert torch.equal(bits(by_kernel(numbers)), bits(of_torch(numbers)))


def test_a_tensor_has_the_results_of_its_numbers(function):
    of_torch, by_kernel = function
    torch.manual_seed(0)
    part = torch.randn(2, 3, 4, 5)[:, :1].contiguous()
    for wide in (torch.randn(7, 333), torch.randn(5, 6, 7).transpose(0, 2), part, torch.ones(0, 3)):
        x = wide.bfloat16()
        result = by_kernel(x)
        assert result.stride() == x.stride()
        assert torch.equal(bits(result), bits(of_torch(x)))


def gradients(function, x=X, gradient=None, **options):
    found = []
    for each in function:
        result = each(leaf := x.clone().requires_grad_())
        given = torch.ones_like(result) if gradient is None else gradient
        found.append(torch.autograd.grad(result, leaf, given, **options)[0])
    return found


def test_gradients_are_at_least_as_exact_as_those_of_torch(function, numbers):
    torch.manual_seed(0)
    # Of larger numbers, torch's derivatives of float64 are not exact enough either.
    x = numbers[(numbers.abs() < 20) & (numbers.abs() > 1e-4)].clone()
    gradient = torch.randn(len(x)).to(x.dtype)
    (exact,) = gradients(function[:1], x.double(), gradient.double())
    found = gradients(function, x, gradient)
    of_torch_error, error = (((each.double() - exact).abs() / exact.abs().clamp(min=1e-5)).max() for each in found)
    assert error <= of_torch_error * 1.01
    assert [each.dtype for each in found] == [x.dtype] * 2


def test_gradients_of_any_layout(function):
    torch.manual_seed(0)
    x = torch.randn(40, 50).bfloat16()
    for gradient in (torch.randn(40, 50), torch.randn(50, 40).t(), torch.randn(50).expand(40, 50)):
        of_torch, by_kernel = gradients(function, x, gradient.bfloat16())
        torch.testing.assert_close(by_kernel, of_torch, rtol=2**-7, atol=1e-6)


def test_second_derivatives(function):
    found = []
    for each in function:
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(each(x).float().square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.float().square().sum(), x)[0])
    # That of mish is computed in another order.
    torch.testing.assert_close(found[1], found[0], rtol=2**-5, atol=2**-6)


def test_a_batch_of_gradients(function):
    assert torch.equal(*gradients(function, gradient=torch.eye(64).bfloat16(), is_grads_batched=True))


def test_what_is_saved_goes_through_the_hooks(function):
    saved = []

    def pack(tensor):
        saved.append((tensor.shape, tensor.dtype))
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        of_torch, by_kernel = gradients(function)
    assert saved == [(X.shape, X.dtype)] * 2
    torch.testing.assert_close(by_kernel, of_torch, rtol=2**-7, atol=1e-6)


UNPACKED = {
    "one number": (lambda x: x.flatten()[:1].clone(), lambda x: x.expand(64, 64)),
    "one row": (lambda x: x[:1].clone(), lambda x: x.expand(64, 64)),
    "another dtype": (lambda x: x, lambda x: x.float()),
    "columns": (lambda x: x, lambda x: x.t().contiguous().t()),
}


@pytest.mark.parametrize("name", UNPACKED)
def test_what_hooks_unpack_may_have_any_layout(function, name):
    with torch.autograd.graph.saved_tensors_hooks(*UNPACKED[name]):
        of_torch, by_kernel = gradients(function, torch.full((64, 64), 0.5).bfloat16())
    torch.testing.assert_close(by_kernel, of_torch, rtol=2**-7, atol=1e-6)


def test_forward_mode_over_the_backward(function):
    of_torch, _ = function
    if of_torch in (F.mish, F.silu):
        pytest.skip("torch's backward has no forward mode")
    found = []
    for each in function:
        x = X.clone().requires_grad_()
        result = each(x)
        with torch.autograd.forward_ad.dual_level():
            gradient = torch.autograd.forward_ad.make_dual(torch.ones_like(x), x.detach())
            (of_x,) = torch.autograd.grad(result, x, gradient)
            found.append(torch.autograd.forward_ad.unpack_dual(of_x).tangent)
    assert found[0] is not None
    assert torch.equal(found[0], found[1])


def test_a_write_to_what_is_saved_raises_in_the_backward(function):
    for each in function:
        x = X.clone().requires_grad_()
        given = x * 1
        result = each(given)
        with torch.no_grad():
            given.add_(1)
            result.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.ones(4096), "neither bfloat16 nor float16"),
        (torch.ones(64).bfloat16(), "fewer than 1024 elements"),
        (torch.ones(64, 64).bfloat16()[:, ::2], "not dense"),
        (torch.ones(4096).bfloat16().requires_grad_(), "fewer than 16384 elements"),
    ],
)
def test_what_is_left_to_torch(x, reason):
    assert reason in lookup_kernels()["aten::silu"].unsupported_reason(x)


def test_an_operator_leaves_other_tensors_to_torch(function):
    of_torch, by_kernel = function
    x = torch.linspace(-3, 3, 64)
    for given in (x, x.double(), x.bfloat16()[::2], torch._neg_view(x.bfloat16()), x[:4].half().expand(3, 4)):
        assert torch.equal(by_kernel(given), of_torch(given))
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        torch.ops.polycast_cpu.lookup_gelu(x.bfloat16(), "erf", x, torch.bfloat16)


FLUSHED = """
import torch
from polycast_plugins.quantize.cpu.few_rows import few_rows_availability
assert few_rows_availability()
x = torch.tensor([1e-39, -3e-39, 1.0]).bfloat16()
expected = torch.sigmoid(x), torch.nn.functional.silu(x)
torch.set_flush_denormal(True)
found = [getattr(torch.ops.polycast_cpu, f"lookup_{name}")(x, x, x.dtype) for name in ("sigmoid", "silu")]
torch.set_flush_denormal(False)
assert expected[1][0] != 0
assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, expected)), (found, expected)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor does not flush denormal numbers")
def test_tables_have_denormal_numbers(launch):
    done = launch(FLUSHED)
    assert done.returncode == 0, done.stderr
