"""MATCH: where torch refuses a mixture of dtypes, a region computes as after a cast by hand."""

import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import polycast

X = torch.linspace(-1, 2, 12).reshape(4, 3)
ROWS = torch.tensor([2, 0])
VECTOR, FEW = torch.tensor([1.5, -2.0, 0.25]), torch.linspace(0.1, 0.9, 6).reshape(2, 3)
BFLOAT16, HALF, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
SYMMETRIC = torch.tensor([[3.0, 1.0], [1.0, 2.0]])

OPERANDS = {"dot": (VECTOR, VECTOR + 1), "index_add": (X, FEW)}
CALLS = {"dot": torch.dot, "index_add": lambda x, y: x.index_add(0, ROWS, y), "mm": torch.mm}
WRITING = {
    "addmv_": (lambda x, y: x.addmv_(y.diag(), y), VECTOR, VECTOR),
    "index_add_": (lambda x, y: x.index_add_(0, ROWS, y), X, FEW),
}
"""A function that calls an op, and two operands, by op; tests/parity/test_mixed_programs.py has the other ops."""


def region(**settings):
    return polycast.autocast("cpu", **settings)


def functional(op, *dtypes):
    """Return what calls an op, and its operands in these dtypes."""
    return CALLS[op], *(each.to(dtype, copy=True) for each, dtype in zip(OPERANDS[op], dtypes, strict=True))


def refused(call, *operands):
    """Return whether torch refuses a call in a region of its own."""
    try:
        with torch.autocast("cpu"):
            call(*operands)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize("dtypes", [(FLOAT32, BFLOAT16), (HALF, FLOAT32), (BFLOAT16, HALF)])
def test_operands_of_a_functional_op_are_cast_to_float32(engine, op, dtypes):
    call, x, y = functional(op, *dtypes)
    assert refused(call, x, y)
    with region():
        result, expected = call(x, y), call(x.float(), y.float())
    assert result.dtype is expected.dtype
    assert torch.equal(result, expected)


@pytest.mark.parametrize("op", WRITING)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_operands_get_the_dtype_of_the_tensor_that_is_written(engine, op, dtype):
    call, x, y = WRITING[op]
    x, y, before = x.to(dtype), y.half(), x.to(dtype, copy=True)
    written, expected = x.clone(), x.clone()
    with region():
        result = call(written, y)
        call(expected, y.to(dtype))
    assert result is written
    assert (written._version, y._version, written.dtype) == (1, 0, dtype)
    assert torch.equal(written, expected)
    assert not torch.equal(written, before)
    assert refused(call, x.clone(), y)


def test_items_of_lists_agree_one_by_one(engine):
    written, ends = [X.clone(), X.bfloat16(), X.clone()], [X.bfloat16() + 1, X.bfloat16() + 1, X + 1]
    expected = [x.lerp(end.to(x), 0.5) for x, end in zip(written, ends, strict=True)]
    with region():
        results = torch._foreach_lerp(written, ends, 0.5)
        torch._foreach_lerp_(written, ends, 0.5)
    assert [each.dtype for each in results] == [each.dtype for each in written] == [FLOAT32, BFLOAT16, FLOAT32]
    assert all(map(torch.equal, results, expected))
    assert all(map(torch.equal, written, expected))


def unmatched():
    """Return calls that no cast of operands would make right."""
    integers = torch.ones(2, dtype=torch.int64)
    return {
        "float64": lambda: X.double().index_add(0, ROWS, FEW),
        "out=": lambda: torch.lerp(X, X.bfloat16(), 0.5, out=torch.empty(4, 3)),
        "two written tensors": lambda: torch._native_batch_norm_legit(
            X, None, None, torch.zeros(3), torch.ones(3).bfloat16(), True, 0.1, 1e-5
        ),
        "written integers": lambda: integers.addmv_(SYMMETRIC, SYMMETRIC[0].bfloat16()),
        "other device": lambda: torch.lerp(X.to("meta"), X.to("meta", BFLOAT16), 0.5),
    }


@pytest.mark.parametrize("name", unmatched())
def test_what_cannot_be_matched_raises_as_in_torch(engine, name):
    with torch.autocast("cpu"), pytest.raises(RuntimeError) as expected:
        unmatched()[name]()
    with region(), pytest.raises(RuntimeError) as raised:
        unmatched()[name]()
    assert str(raised.value) == str(expected.value)


def test_statistics_are_written_back_under_a_transform(engine):
    found, expected = ((torch.zeros(4, dtype=each), torch.ones(4, dtype=each)) for each in (BFLOAT16, FLOAT32))
    with polycast.autocast("cpu", BFLOAT16):
        torch.func.vjp(lambda x: torch.native_batch_norm(x, None, None, *found, True, 0.5, 1e-5)[0], torch.eye(4))
    torch.native_batch_norm(torch.eye(4), None, None, *expected, True, 0.5, 1e-5)
    assert all(torch.equal(each, other.bfloat16()) for each, other in zip(found, expected, strict=True))


def test_a_region_of_torchs_raises_as_without_kernels(engine):
    polycast.install("cpu")
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="same dtype"):
        torch.dot(VECTOR, VECTOR.bfloat16())
    with region(), torch.autocast("cpu"):  # which is inside of one
        assert torch.dot(VECTOR, VECTOR.bfloat16()).dtype is FLOAT32


@pytest.mark.parametrize("op", ["index_add", "mm"])
def test_a_policy_can_say_match(engine, op):
    call, other = CALLS[op], {"index_add": FEW, "mm": X.T}[op]
    with region(policy={op: "match"}):
        result = call(X, other.bfloat16())
        fast = call(X.bfloat16(), other.bfloat16())
    assert torch.equal(result, call(X, other.bfloat16().float()))
    assert (result.dtype, fast.dtype) == (FLOAT32, BFLOAT16)


@pytest.mark.parametrize("op", OPERANDS)
def test_passthrough_switches_it_off(engine, op):
    call, x, y = functional(op, FLOAT32, BFLOAT16)
    with region(policy={op: "passthrough"}), pytest.raises(RuntimeError):
        call(x, y)
    with region(policy={op: "passthrough"}), region(policy={op: "match"}):
        assert call(x, y).dtype is FLOAT32


def test_gradients_of_a_written_tensor_are_those_of_a_cast_by_hand(engine):
    def gradients(cast):
        x, y = X.clone().requires_grad_(), FEW.bfloat16().requires_grad_()
        with region():
            (x * 2).index_add_(0, ROWS, cast(y)).square().sum().backward()
        return x.grad, y.grad

    assert all(map(torch.equal, gradients(lambda y: y), gradients(torch.Tensor.float)))


def test_backward_runs_outside_of_the_region(engine):
    x = X.clone().requires_grad_()
    with region():
        y = torch.softmax(x, 1)
    with region():
        (grad,) = torch.autograd.grad(y.lerp(y.bfloat16(), 0.5).sum(), x)
    assert (grad.dtype, grad.isfinite().all().item()) == (FLOAT32, True)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_computes_the_same_again(engine, use_reentrant):
    def of(run):
        x, y = X.clone().requires_grad_(), FEW.bfloat16().requires_grad_()
        with region():
            total = run(lambda x, y: (x * 2).index_add(0, ROWS, y), x, y).square().sum()
        total.backward()
        return total, x.grad, y.grad

    expected = of(lambda function, *args: function(*args))
    assert all(map(torch.equal, of(functools.partial(checkpoint, use_reentrant=use_reentrant)), expected))


def test_transforms_of_functions(engine):
    def dot(x, y):
        return x.lerp(y, 0.5)

    y = X.bfloat16() + 1
    with region():
        mapped = torch.vmap(dot)(X, y)
        value, tangent = torch.func.jvp(dot, (X, y), (torch.ones_like(X), torch.ones_like(y)))
        gradient = torch.func.grad(lambda x: dot(x, y).sum())(X)
    assert torch.equal(mapped, X.lerp(y.float(), 0.5))
    assert torch.equal(value, mapped)
    assert torch.equal(tangent, torch.ones_like(X))
    assert torch.equal(gradient, torch.full_like(X, 0.5))


@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_matches_too(engine, backend, place):
    if (backend, place) == ("eager", "inside"):
        pytest.skip("Dynamo makes a plain region one of torch's, which this backend runs as it is")

    def step(x, y, end):
        return (x * 2).index_add(0, ROWS, y).lerp(end, 0.5)

    def with_region(x, y, end):
        with region():
            return step(x, y, end)

    torch.compiler.reset()
    y, end = FEW.bfloat16(), X.bfloat16()
    compiled = torch.compile(with_region if place == "inside" else step, backend=backend)
    function = compiled if place == "inside" else region()(compiled)
    expected = (X * 2).index_add(0, ROWS, y.float()).lerp(end.float(), 0.5)
    torch.testing.assert_close(function(X, y, end), expected)


def test_fake_tensors_get_the_dtypes_of_real_ones(engine):
    with FakeTensorMode(), region():
        x, y = torch.empty(4, 3), torch.empty(4, 3, dtype=BFLOAT16)
        assert x.lerp(y, 0.5).dtype is FLOAT32
        assert y.clone().lerp_(x, 0.5).dtype is BFLOAT16


def test_a_leaf_stays_a_leaf_and_a_view_a_view(engine):
    leaf, base = X.clone().requires_grad_(), torch.zeros(5, 3)
    with region():
        with torch.no_grad():
            leaf.lerp_(X.bfloat16() + 1, 0.5)
        base[1:].index_add_(0, ROWS, FEW.bfloat16())
    assert (leaf.is_leaf, leaf._version, base._version) == (True, 1, 1)
    assert torch.equal(leaf, X.lerp((X.bfloat16() + 1).float(), 0.5))
    assert torch.equal(base[1:], torch.zeros(4, 3).index_add(0, ROWS, FEW.bfloat16().float()))


def test_ops_inside_of_a_matched_op_are_autocast(engine):
    with region():
        result = torch.tensordot(X, X.T.bfloat16(), 1)
    assert result.dtype is BFLOAT16
    with torch.autocast("cpu"):
        assert torch.equal(result, torch.tensordot(X.bfloat16(), X.T.bfloat16(), 1))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("op", [torch.special.zeta, torch.special.chebyshev_polynomial_t])
def test_a_number_has_no_dtype_to_match(engine, op, order, dtype):
    x = (X + 2).to(dtype)
    with polycast.autocast("cpu"):
        result = op(*(x, 2.0)[::order])
    assert result.dtype is FLOAT32
    assert torch.equal(result, op(*(x.float(), 2.0)[::order]))


@pytest.mark.usefixtures("fake")
def test_a_number_on_the_cpu_is_cast_for_an_op_of_another_device(engine, hand_made):
    hand_made("mps")
    x, number = torch.zeros(4, 3, dtype=BFLOAT16, device="mps"), torch.tensor(1.5)
    with pytest.raises(RuntimeError, match="dtype"):
        x.lerp(number, 0.5)
    with polycast.autocast("mps", BFLOAT16):
        assert x.lerp(number, 0.5).dtype is FLOAT32
        assert x.lerp_(number, 0.5).dtype is BFLOAT16
        with pytest.raises(RuntimeError, match="dtype"):
            x.lerp(number[None], 0.5)
