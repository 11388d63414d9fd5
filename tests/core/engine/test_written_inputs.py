"""Policies of ops that write to their inputs: the written tensors are never cast, the others are."""

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")
FAST = torch.bfloat16


def third(*shape, dtype=torch.float32):
    """Return thirds, which bfloat16 rounds."""
    return torch.full(shape or (3,), 1 / 3, dtype=dtype)


@pytest.mark.parametrize("policy", ["lower_precision_fp", "lower_first"])
def test_an_in_place_op_casts_what_it_reads_to_the_fast_dtype(policy):
    written = torch.zeros(3)
    with polycast.autocast("cpu", policy={"add_": policy}):
        returned = written.add_(third())
    assert returned is written
    assert torch.equal(written, third(dtype=FAST).float())


def test_an_in_place_op_casts_what_it_reads_to_float32():
    written = torch.ones(2, 2)
    with polycast.autocast("cpu", policy={"addmm_": "fp32"}):
        written.addmm_(third(2, 3, dtype=FAST), third(3, 2, dtype=FAST))
    factors = third(2, 3, dtype=FAST).float(), third(3, 2, dtype=FAST).float()
    assert torch.equal(written, torch.ones(2, 2).addmm_(*factors))


def test_promote_compares_with_the_written_tensor_and_leaves_it(subtests):
    half = torch.float16
    for dtypes, seen in [((torch.float32, FAST), torch.float32), ((FAST, half), torch.float32), ((FAST, FAST), FAST)]:
        with subtests.test(dtypes=dtypes), polycast.autocast("cpu", policy={"copy_": "promote"}):
            written, read = (third(dtype=dtype) for dtype in dtypes)
            explained = polycast.explain("copy_", written, read, device_type="cpu")
            assert [each.seen for each in explained.arguments] == [dtypes[0], seen]
            assert written.copy_(read).dtype is dtypes[0]


def test_the_items_of_a_written_list_are_not_cast():
    written, first = [torch.zeros(3), torch.zeros(2)], [third(), third(2)]
    with polycast.autocast("cpu", policy={"_foreach_add_": "lower_precision_fp"}):
        torch._foreach_add_(written, first)
    assert [each.dtype for each in written] == [torch.float32] * 2
    assert torch.equal(written[0], third(dtype=FAST).float())


def test_a_tensor_that_is_written_and_read_is_read_before():
    written = third()
    with polycast.autocast("cpu", policy={"mul_": "lower_precision_fp"}):
        written.mul_(written)
    assert torch.equal(written, third() * third(dtype=FAST))


def test_gradients_are_those_of_a_cast_by_hand():
    def gradients(region, cast):
        x, y = third().requires_grad_(), third().requires_grad_()
        with region:
            z = (x * 1).mul_(cast(y))
        return torch.autograd.grad(z.sum(), (x, y))

    found = gradients(polycast.autocast("cpu", policy={"mul_": "lower_precision_fp"}), lambda y: y)
    expected = gradients(polycast.autocast("cpu"), lambda y: y.to(FAST))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_custom_op_that_mutates_an_argument_can_be_cast():
    seen = []

    @torch.library.custom_op("polycast_test::accumulate", mutates_args=("total",))
    def accumulate(total: torch.Tensor, x: torch.Tensor) -> None:
        seen.append((total.dtype, x.dtype))
        total.add_(x)

    total = torch.zeros(3)
    with polycast.register_op(accumulate, "lower_precision_fp"), polycast.autocast("cpu"):
        accumulate(total, third())
    assert seen == [(torch.float32, FAST)]
    assert torch.equal(total, third(dtype=FAST).float())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_casts_the_same(backend):
    def function(x, y):
        with polycast.autocast("cpu", policy={"add_": "lower_precision_fp"}):
            return x.clone().add_(y)

    torch.compiler.reset()
    found = torch.compile(function, backend=backend, fullgraph=True)(torch.zeros(3), third())
    assert torch.equal(found, third(dtype=FAST).float())
