"""MATCH, where a number or a tensor with one value stands among the inputs of an op."""

import pytest
import torch

import polycast

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
X = torch.linspace(-1, 1, 12).view(4, 3)


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
