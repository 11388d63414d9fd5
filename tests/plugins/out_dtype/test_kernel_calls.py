"""out_dtype: where the backend's kernel runs, and where torch's operator does."""

import contextlib

import pytest
import torch
from tests.plugins.modes import Seen
from torch.overrides import TorchFunctionMode

import polycast
from polycast import out_dtype
from polycast.registry.registry import registry

from .int8_matrices import ATEN, BMM, MM, OPERATOR, int8, outcome, same, same_as_torchs


@pytest.fixture
def ran(hand_made):
    """Register a backend for the CPU whose kernel for mm records its calls; return the records."""
    notes = []

    def kernel(a, b):
        notes.append((torch.is_grad_enabled(), (a.float() @ b.float()).dtype))
        return torch.mm(a.double(), b.double()).to(torch.float32 if a.is_floating_point() else torch.int32)

    hand_made("cpu", kernels={(MM, torch.int8, torch.int32): kernel, (MM, torch.bfloat16, torch.float32): kernel})
    return notes


class Mine(torch.Tensor):
    pass


SQUARE = int8(2, 2)
OTHERS = {
    "int64": (torch.int64, SQUARE, SQUARE),
    "int16": (torch.int32, SQUARE.short(), SQUARE.short()),
    "float32": (torch.float64, SQUARE.float(), SQUARE.float()),
    "several dtypes": (torch.int32, SQUARE, SQUARE.short()),
    "a subclass": (torch.int32, SQUARE.as_subclass(Mine), SQUARE),
    "a sparse tensor": (torch.int32, SQUARE.to_sparse(), SQUARE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_inputs_go_to_torchs_operator(ran, name):
    same_as_torchs(MM, *OTHERS[name])
    assert ran == []


@pytest.mark.parametrize("region", [polycast.autocast, torch.autocast])
def test_autocast_casts_nothing_of_a_kernel(ran, region):
    a, b = torch.randn(8, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    with region("cpu"):
        result = out_dtype(MM, torch.float32, a, b)
        assert torch.is_autocast_enabled("cpu")
    same(result, torch.mm(a.double(), b.double()).float())
    assert [dtype for _, dtype in ran] == [torch.float32]


@pytest.mark.parametrize(
    "around",
    [contextlib.nullcontext, torch.no_grad, torch.inference_mode, torch.enable_grad, lambda: torch.device("cpu")],
    ids=["as it is", "no_grad", "inference_mode", "enable_grad", "a default device"],
)
def test_a_third_partys_kernel_runs_in_every_mode(ran, around):
    with around():
        a, b = int8(3, 4), int8(4, 5)
        same(out_dtype(MM, torch.int32, a, b), torch.mm(a.int(), b.int()))
    assert len(ran) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "operator"])
def test_backward_raises_what_torchs_operator_raises(ran, dtype):
    weight = torch.nn.Parameter(torch.arange(16.0).reshape(4, 4).bfloat16())
    results = [function(MM, dtype, weight, weight) for function in (out_dtype, OPERATOR)]
    same(*(result.detach() for result in results))
    for result in results:
        assert (result.requires_grad, result.is_leaf) == (True, False)
        assert outcome(result.sum().backward) == (RuntimeError, "Autograd not implemented for out_dtype")
    assert ran == ([(False, torch.float32)] if dtype is torch.float32 else [])


def test_nothing_is_recorded_where_no_gradient_is_wanted(ran):
    weight = torch.nn.Parameter(torch.randn(4, 4).bfloat16())
    with torch.no_grad():
        assert not out_dtype(MM, torch.float32, weight, weight).requires_grad
    assert ran == [(False, torch.float32)]


class Functions(TorchFunctionMode):
    def __init__(self):
        self.ops = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.ops.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Seen])
def test_a_mode_sees_torchs_operator(ran, mode):
    a, b = int8(2, 2), int8(2, 2)
    with mode() as watching:
        result = out_dtype(MM, torch.int32, a, b)
    assert OPERATOR in watching.ops
    assert ran == []
    same(result, torch.mm(a.int(), b.int()))


def test_fake_and_meta_tensors_go_to_torchs_operator(ran, fake):
    on_cuda = torch.ones(3, 3, dtype=torch.bfloat16, device="cuda")
    for a in (int8(3, 3), torch.ones(3, 3, dtype=torch.int8, device="meta"), on_cuda):
        result = out_dtype(MM, torch.float32, a, a)
        assert (type(result), result.dtype, result.device) == (type(a), torch.float32, a.device)
    assert ran == []


def test_vmap_gives_the_same_as_torchs_operator(ran):
    a = int8(2, 3, 3)
    error, message = outcome(torch.vmap(lambda a: OPERATOR(MM, torch.int32, a, a)), a)
    assert outcome(torch.vmap(lambda a: out_dtype(MM, torch.int32, a, a)), a) == (error, message)
    assert ran == []


def test_the_kernels_of_an_unavailable_backend_do_not_run(hand_made):
    def never(*args):
        raise AssertionError

    kernels = {(MM, torch.int8, torch.int32): never, (BMM, torch.int8, torch.int32): never}
    hand_made("cpu", kernels=kernels, availability=lambda: polycast.plugin.Availability(False, "not today"))
    a = int8(2, 2)
    same_as_torchs(MM, torch.int32, a, a)
    with pytest.raises(ValueError, match="out_dtype only allows the following operators"):
        out_dtype(BMM, torch.int32, a[None], a[None])


def test_a_device_without_a_backend_goes_to_torchs_operator(monkeypatch):
    def find(device_type):
        raise polycast.errors.BackendNotFoundError(device_type)

    monkeypatch.setattr(registry, "find", find)
    a = int8(2, 2)
    same_as_torchs(MM, torch.int32, a, a)


def test_a_broken_backend_raises(monkeypatch):
    def find(device_type):
        raise polycast.errors.BackendBrokenError("broken")

    monkeypatch.setattr(registry, "find", find)
    with pytest.raises(polycast.errors.BackendBrokenError, match="broken"):
        out_dtype(MM, torch.int32, int8(2, 2), int8(2, 2))


@pytest.mark.parametrize(("op", "shape"), [(MM, (3, 3)), (BMM, (2, 3, 3))], ids=["mm", "bmm"])
def test_a_kernel_may_return_not_implemented(hand_made, op, shape):
    hand_made("cpu", kernels={(op, torch.int8, torch.int32): lambda a, b: NotImplemented})
    a = int8(*shape)
    same(out_dtype(op, torch.int32, a, a), op(a.int(), a.int()))


@pytest.mark.parametrize(
    ("result", "got"), [(torch.ones(1), "one in torch.float32"), (None, "None"), ([1], "[1]")], ids=str
)
def test_a_kernel_that_returns_another_dtype_raises(hand_made, result, got):
    hand_made("cpu", kernels={(MM, torch.int8, torch.int32): lambda a, b: result})
    message = f"the kernel for aten.mm.default must return a tensor in torch.int32, got {got}"
    found = outcome(out_dtype, MM, torch.int32, int8(2, 2), int8(2, 2))
    assert found == (polycast.errors.InvalidBackendError, message)


@pytest.mark.parametrize("op", [ATEN.mul_.Tensor, ATEN.sort.default, ATEN.mm.out], ids=str)
def test_a_kernel_is_for_a_functional_op_that_returns_one_tensor(hand_made, op):
    message = f"kernels: {op} must be a functional op that returns one tensor"
    with pytest.raises(polycast.errors.InvalidBackendError, match=message):
        hand_made("cpu", kernels={(op, torch.int8, torch.int32): torch.mm})
