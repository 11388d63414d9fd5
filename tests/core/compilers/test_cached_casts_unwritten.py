"""No compiled code, and no caller of it, writes to a cached cast."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("engine")
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
SIZE = 64


def _writes_its_first(w, x):
    return torch.index_put(w, (torch.tensor([1]),), x[0]) * 2


def _returns_a_view(w, x):
    return torch.einsum("ij->ji", w)


def _returns_the_cast(w, x):
    return torch.einsum("ij->ij", w), torch.mm(x, w)


def _uses_it_last(w, x):
    return torch.relu(torch.mm(x, w) + 1)


def _as_a_bias(w, x):
    return torch.addmm(w, x, w).relu()


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", [_writes_its_first, _returns_a_view, _returns_the_cast, _uses_it_last, _as_a_bias])
def test_compiled_code_does_not_write_a_cached_cast(backend, grad, function, cache, in_region):
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


def _a_view(w):
    return torch.einsum("ij->ji", w)


def _a_part(w):
    return torch.einsum("ij->ij", w)[3:5, 2:]


def _several_parts(w):
    return torch.einsum("ij->ij", w).chunk(2)[1]


def _from_a_branch(w):
    return torch.cond(
        w.sum() > -1e9, lambda w: torch.einsum("ij->ij", w), lambda w: torch.einsum("ij->ij", w) * 2, (w,)
    )


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", [_the_cast, _a_view, _a_part, _several_parts, _from_a_branch])
def test_a_caller_may_write_what_compiled_code_returns(backend, grad, function, cache, in_region):
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
