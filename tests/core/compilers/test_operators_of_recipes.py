"""Operators of recipes in compiled code, where an op is defined again, a kernel raises, or Python enters a region."""

import contextlib

import pytest
import torch
from tests.core.rounding import Rounded
from torch import nn

import polycast
from polycast import autocast

pytestmark = pytest.mark.usefixtures("engine", "no_grad")
NAME = "polycast_test::product"
RECIPE = Rounded(min_size=1)
X = torch.ones(2, 8)


@contextlib.contextmanager
def defined(factor, options=""):
    """Define an op of another library, which multiplies products by a factor."""
    with torch.library._scoped_library("polycast_test", "FRAGMENT") as library:
        library.define(f"product(Tensor x, Tensor weight{options}) -> Tensor")
        library.impl("product", lambda x, weight, *_: factor * (x @ weight.t()), "CompositeExplicitAutograd")
        yield


@pytest.fixture
def linear(int8_kernels):
    return int8_kernels["aten::linear"]


@pytest.fixture
def compiled(linear):
    """Return a linear that is compiled in a region with a recipe."""
    layer = torch.compile(nn.Linear(8, 4), backend="aot_eager", fullgraph=True)
    with autocast("cpu", recipe=RECIPE):
        layer(X)
    return layer


def test_it_calls_the_op_that_is_defined_now(int8_kernels, linear, monkeypatch):
    int8_kernels[NAME] = linear
    monkeypatch.setattr(linear, "prepack", lambda weight: None)  # so that it calls the op
    weight = nn.Parameter(torch.ones(4, 8))

    def run_compiled_code():
        with autocast("cpu", recipe=recipe):
            operator = torch.ops.polycast.low_bit_polycast_test_product
            return operator(X, weight, recipe.text, 0, torch.bfloat16)[0, 0].item()

    with defined(1):
        recipe = Rounded(ops=[NAME], min_size=1)
        product = torch.compile(lambda: torch.ops.polycast_test.product(X, weight), backend="eager", fullgraph=True)
        with polycast.register_op(NAME, "lower_precision_fp"), autocast("cpu", recipe=recipe):
            assert product()[0, 0] == 8
        assert run_compiled_code() == 8
    polycast.uninstall()  # a kernel of polycast keeps what torch knows of an op
    with pytest.raises(RuntimeError, match=f"^Could not find schema for {NAME}"):
        run_compiled_code()
    with defined(2):
        assert run_compiled_code() == 16
    polycast.uninstall()
    with defined(2, ", float a=1, int b=1, int c=1, int d=1, int e=1"), pytest.raises((RuntimeError, ValueError)):
        run_compiled_code()


def test_an_error_of_a_kernel_leaves_later_calls_as_they_are(compiled, linear, monkeypatch):
    with autocast("cpu", recipe=RECIPE):
        expected = compiled(X)
        with monkeypatch.context() as patched:
            patched.setattr(linear, "run", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                compiled(X)
        assert torch.equal(compiled(X), expected)


def test_what_runs_in_a_call_that_is_declined_may_enter_a_region(compiled, linear, monkeypatch):
    with contextlib.ExitStack() as entered:
        entered.enter_context(autocast("cpu", recipe=RECIPE))
        polycast.clear_autocast_cache()  # also of prepacked weights
        regions = [autocast("cpu", torch.float16)]
        monkeypatch.setattr(linear, "prepack", lambda weight: entered.enter_context(regions.pop()) and None)
        assert compiled(X).dtype is torch.bfloat16
        assert regions == []
    assert not torch.is_autocast_enabled("cpu")
