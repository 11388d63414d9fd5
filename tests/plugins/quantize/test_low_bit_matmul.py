"""`LowBitMatmul`: the kernels of four ops, and the calls that they do not support."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import polycast
from polycast_plugins.quantize import LowBitMatmul


class Product(LowBitMatmul):
    """Multiplies in float64, and records its arguments."""

    def __init__(self):
        self.given = []

    def prepack(self, weight):
        return (weight.double().contiguous(),)

    def multiply(self, x, packed, bias, alpha):
        self.given.append((tuple(x.shape), alpha))
        product = alpha * (x.double() @ packed[0].t())
        return (product if bias is None else product + bias).to(torch.get_autocast_dtype("cpu"))


class OfBatches(Product):
    takes_batches = True


class NoRows(Product):
    def unsupported_reason(self, x, size, bias):
        return f"{list(x.shape)} by {list(size)} and {bias is not None}"


def run(product, op, *args):
    kernel = product.kernels()[f"aten::{op}"]
    assert kernel.unsupported_reason(*args) is None
    return kernel.run(kernel.prepack(args[kernel.weight]), *args)


@pytest.mark.parametrize("of", [Product, OfBatches])
def test_linear_and_matmul_take_activations_of_any_number_of_dimensions(of, subtests):
    for shape in [(6,), (5, 6), (2, 5, 6), (2, 1, 5, 6), (0, 6), (2, 0, 6)]:
        with subtests.test(shape=shape):
            x, weight, bias = torch.randn(shape), torch.randn(4, 6), torch.randn(4)
            torch.testing.assert_close(run(of(), "linear", x, weight, bias), F.linear(x, weight, bias).bfloat16())
            torch.testing.assert_close(run(of(), "linear", x, weight, None), F.linear(x, weight).bfloat16())
            torch.testing.assert_close(run(of(), "matmul", x, weight.t()), F.linear(x, weight).bfloat16())


def test_multiply_gets_matrices_unless_it_takes_batches():
    args = torch.randn(2, 5, 6), torch.randn(4, 6), None
    rows, batches = Product(), OfBatches()
    run(rows, "linear", *args), run(batches, "linear", *args)
    assert (rows.given, batches.given) == ([((10, 6), 1.0)], [((2, 5, 6), 1.0)])


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (2, -0.5), (0.25, 3), (0, 1)])
def test_addmm_applies_beta_and_alpha(beta, alpha, subtests):
    for added in [(4,), (1,), (), (5, 4), (1, 4), (5, 1)]:
        with subtests.test(added=added):
            x, weight = torch.randn(5, 6), torch.randn(6, 4)
            bias = torch.randn(added) if beta else torch.full(added, torch.nan)  # which torch then ignores
            expected = torch.addmm(bias, x, weight, beta=beta, alpha=alpha).bfloat16()
            torch.testing.assert_close(run(Product(), "addmm", bias, x, weight, beta, alpha), expected)


def test_prepack_gets_a_row_for_each_output_feature_from_every_op():
    weight = torch.randn(4, 6)
    kernels = Product().kernels()
    for op, given in {"linear": weight, "matmul": weight.t(), "mm": weight.t(), "addmm": weight.t()}.items():
        assert torch.equal(kernels[f"aten::{op}"].prepack(given)[0], weight.double())


def test_ops_of_one_class_with_the_same_weight_layout_share_prepacked_weights():
    linear, *others = (Product().kernels()[f"aten::{op}"].prepack_key for op in ("linear", "matmul", "mm", "addmm"))
    assert len({linear, *others}) == 2
    assert linear not in others
    assert [of().kernels()["aten::linear"].prepack_key == linear for of in (Product, OfBatches)] == [True, False]


class InOps(Product):
    operators = {f"aten::{op}": lambda *args: args for op in ("linear", "matmul", "mm", "addmm")}
    constants = (True, 2)


@pytest.mark.parametrize("op", ["linear", "matmul", "mm", "addmm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_operator_gets_the_arguments_the_prepacked_weight_the_fast_dtype_and_the_constants(op, dtype):
    x, weight, bias = torch.ones(5, 6), torch.ones(4, 6), torch.ones(4)
    args = {"linear": (x, weight, bias), "addmm": (bias, x, weight.t(), 2, 3)}.get(op, (x, weight.t()))
    packed = (torch.ones(2), torch.ones(3))
    with torch.autocast("cpu", dtype):
        assert InOps().kernels()[f"aten::{op}"].run(packed, *args) == (*args, *packed, dtype, True, 2)


def test_a_kernel_without_an_operator_must_define_run():
    with pytest.raises(NotImplementedError):
        polycast.plugin.LowBitKernel().run((), torch.ones(5, 6), torch.ones(4, 6), None)


X, WEIGHT = torch.ones(5, 6), torch.ones(4, 6)
DECLINED = {
    "the weight is not a matrix": [
        ("linear", X, torch.ones(6), None),
        ("matmul", X, torch.ones(2, 6, 4)),
        ("matmul", X, torch.ones(6)),
        ("addmm", torch.ones(4), X, torch.ones(6), 1, 1),
    ],
    "the sizes do not fit": [
        ("linear", X, torch.ones(4, 7), None),
        ("linear", torch.tensor(1.0), torch.ones(1, 1), None),
        ("matmul", torch.tensor(1.0), torch.ones(1, 1)),
        ("matmul", X, WEIGHT),
        ("mm", X, WEIGHT),
        ("mm", X[None], WEIGHT.t()),
        ("mm", X[0], WEIGHT.t()),
        ("addmm", torch.ones(4), X[None], WEIGHT.t(), 1, 1),
        ("addmm", torch.ones(3), X, WEIGHT.t(), 1, 1),
        ("addmm", torch.ones(1, 5, 4), X, WEIGHT.t(), 1, 1),
        ("addmm", torch.ones(2, 4), X[:1], WEIGHT.t(), 1, 1),
    ],
    "the weight has no elements": [
        ("linear", torch.ones(5, 0), torch.ones(4, 0), None),
        ("matmul", X, torch.ones(6, 0)),
        ("mm", torch.ones(5, 0), torch.ones(0, 4)),
    ],
    "the bias is not a vector of the output features": [
        ("linear", X, WEIGHT, torch.ones(1)),
        ("linear", X, WEIGHT, torch.ones(5, 4)),
    ],
    "beta or alpha is complex": [
        ("addmm", torch.ones(4), X, WEIGHT.t(), 1j, 1),
        ("addmm", torch.ones(4), X, WEIGHT.t(), 1, 1j),
    ],
}


@pytest.mark.parametrize("reason", DECLINED)
def test_an_unsupported_call_has_a_reason_on_real_and_fake_tensors(reason):
    for op, *args in DECLINED[reason]:
        kernel = NoRows().kernels()[f"aten::{op}"]
        assert kernel.unsupported_reason(*args) == reason
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in args]
            assert kernel.unsupported_reason(*fakes) == reason


def test_unsupported_reason_gets_the_size_of_the_weight_and_the_bias():
    kernels = NoRows().kernels()
    assert kernels["aten::linear"].unsupported_reason(X, WEIGHT, None) == "[5, 6] by [4, 6] and False"
    assert kernels["aten::mm"].unsupported_reason(X, WEIGHT.t()) == "[5, 6] by [4, 6] and False"
    assert kernels["aten::addmm"].unsupported_reason(torch.ones(4), X, WEIGHT.t(), 1, 1) == "[5, 6] by [4, 6] and True"
