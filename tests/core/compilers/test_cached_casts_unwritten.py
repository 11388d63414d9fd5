"""No compiled code, and no caller of it, writes to a cached cast."""

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

pytestmark = NATIVE
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
SIZE = 64


WITH_AN_INPUT = {
    "writes its first": lambda w, x: torch.index_put(w, (torch.tensor([1]),), x[0]) * 2,
    "returns a view": lambda w, x: torch.einsum("ij->ji", w),
    "returns the cast": lambda w, x: (torch.einsum("ij->ij", w), torch.mm(x, w)),
    "uses it last": lambda w, x: torch.relu(torch.mm(x, w) + 1),
    "as a bias": lambda w, x: torch.addmm(w, x, w).relu(),
}


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", WITH_AN_INPUT)
def test_compiled_code_does_not_write_a_cached_cast(backend, grad, name, cache, in_region):
    function = WITH_AN_INPUT[name]
    w, x = nn.Parameter(torch.randn(SIZE, SIZE)), torch.randn(SIZE, SIZE)
    policy = {"index_put": "lower_precision_fp", "einsum": "lower_precision_fp"}

    def call(f):
        outputs = in_region(f, w, x, cache=cache, policy=policy)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.set_grad_enabled(grad):
        expected = [y.clone() for y in call(function)]
        for _ in range(3):
            outputs = call(compiled)
            for y, wanted in zip(outputs, expected, strict=True):
                torch.testing.assert_close(y, wanted, rtol=0.02, atol=0.02)
            if grad:
                sum(y.float().square().sum() for y in outputs).backward()
            else:
                for y in outputs:
                    y.mul_(3)  # the caller owns the result
    with torch.no_grad():
        call(function)  # compares the cast with its weight once more


def _the_cast(w):
    return torch.einsum("ij->ij", w)


def _from_a_branch(w):
    return torch.cond(w.sum() > -1e9, _the_cast, lambda w: _the_cast(w) * 2, (w,))


RETURNS = {
    "the cast": _the_cast,
    "a view": lambda w: torch.einsum("ij->ji", w),
    "a part": lambda w: _the_cast(w)[3:5, 2:],
    "several parts": lambda w: _the_cast(w).chunk(2)[1],
    "from a branch": _from_a_branch,
}


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", RETURNS)
def test_a_caller_may_write_what_compiled_code_returns(backend, grad, name, cache, in_region):
    function = RETURNS[name]
    w = nn.Parameter(torch.randn(SIZE, SIZE))
    policy = {"einsum": "lower_precision_fp"}
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.set_grad_enabled(grad):
        expected = in_region(torch.compile(function, backend="aot_eager"), w, policy=policy)
        for _ in range(3):
            y = in_region(compiled, w, cache=cache, policy=policy)
            assert torch.equal(y, expected)
            assert y.stride() == expected.stride()
            y.detach().zero_()


@pytest.mark.parametrize("grad", [False, True])
def test_a_cast_returned_twice_is_two_tensors(grad, cache, in_region):
    w = nn.Parameter(torch.randn(SIZE, SIZE))
    compiled = torch.compile(lambda w: (_the_cast(w), _the_cast(w)), backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        one, other = in_region(compiled, w, cache=cache, policy={"einsum": "lower_precision_fp"})
    one.detach().zero_()
    assert torch.equal(other, w.bfloat16())
