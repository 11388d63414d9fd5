"""polycast.autocast in scripted modules and methods."""

import io
import re
import subprocess
import sys

import pytest
import torch
from torch.testing import FileCheck

import polycast

A, B = torch.rand(2, 2), torch.rand(2, 2)
HALF, FLOAT, DOUBLE, BFLOAT = torch.float16, torch.float32, torch.float64, torch.bfloat16
TO_REDUCED, TO_FULL = "aten::_autocast_to_reduced_precision", "aten::_autocast_to_full_precision"


def layer(autocast):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 2))
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x):
            with autocast("cpu", torch.bfloat16):
                return self.linear(self.weight.mm(x))

    return torch.jit.script(Layer())


def kinds(graph):
    """Return the kinds of a graph's nodes, which, unlike their types, do not count the modules scripted before."""
    return re.findall(r"(?:aten|prim)::\w+", str(graph))


def test_a_module_casts_as_with_torch():
    by_torch, by_polycast = layer(torch.autocast), layer(polycast.autocast)
    assert by_torch(A).dtype is by_polycast(A).dtype is BFLOAT
    assert TO_REDUCED in kinds(by_polycast.graph_for(A))
    assert kinds(by_polycast.graph_for(A)) == kinds(by_torch.graph_for(A))


def test_gradients_go_through_the_casts_of_a_module():
    module = layer(polycast.autocast)
    for _ in range(3):
        module(A).sum().backward()
    assert [weight.grad.dtype for weight in module.parameters()] == [FLOAT] * 3


def test_a_saved_module_is_torchs_own():
    file = io.BytesIO()
    torch.jit.save(layer(polycast.autocast), file)
    assert b"polycast.region" not in file.getvalue()
    file.seek(0)
    assert torch.jit.load(file)(A).dtype is BFLOAT


@pytest.mark.parametrize("autocast", [torch.autocast, polycast.autocast])
def test_a_frozen_module_has_its_weights_cast(autocast):
    module = torch.jit.freeze(layer(autocast).eval())
    count = FileCheck().check_count(TO_REDUCED, 2, exactly=True)  # of the input, and of the first product
    count.run(module.graph)
    module(A)
    count.run(module.graph_for(A))


@pytest.fixture(scope="module")
def product():
    """An interface of a module that multiplies, and a scripted module that has it."""

    @torch.jit.interface
    class Product(torch.nn.Module):
        def forward(self, a, b) -> torch.Tensor:
            pass

    class Plain(torch.nn.Module):
        def forward(self, a, b):
            return torch.mm(a, b)

    return Product, torch.jit.script(Plain())


@pytest.mark.parametrize("autocast", [torch.autocast, polycast.autocast])
def test_a_method_of_an_interface_is_called_where_the_caller_has_a_region(engine, product, autocast):
    Product, plain = product

    class Caller(torch.nn.Module):
        implementation: Product

        def forward(self, a, b):
            with autocast("cpu", torch.bfloat16):
                return self.implementation.forward(torch.mm(a, b), b)

    caller = Caller()
    caller.implementation = plain
    caller = torch.jit.script(caller)
    with autocast("cpu", torch.bfloat16):
        assert caller(A, B).dtype is BFLOAT
    with pytest.raises(RuntimeError, match="AMP & JIT"):
        caller(A, B)


def test_a_module_that_holds_a_region_can_be_scripted():
    class Holder(torch.nn.Module):
        def __init__(self, region):
            super().__init__()
            self.region = region

        def forward(self, a, b):
            return torch.mm(a, b)

    held = torch.jit.script(Holder(polycast.autocast("cpu", torch.float16, enabled=False))).region
    assert (held.device, held.fast_dtype, held._enabled) == ("cpu", 5, False)  # TorchScript's dtypes are ints


def test_torchs_class_is_found_where_torch_autocast_is_replaced(monkeypatch):
    monkeypatch.setattr(torch, "autocast", polycast.autocast)

    def f(a, b):
        with torch.autocast("cpu"):
            return torch.mm(a, b)

    assert torch.jit.script(f)(A, B).dtype is BFLOAT


FRESH = """
import warnings, torch, polycast
from torch.jit._state import _script_classes

warnings.simplefilter("ignore", DeprecationWarning)

def plain(a):
    return torch.mm(a, a)

def region(a):
    with polycast.autocast("cpu"):
        return torch.mm(a, a)

torch.jit.script(plain)
print(list(_script_classes))
print(torch.jit.script(region)(torch.ones(2, 2)).dtype)
print(list(_script_classes))
"""


@pytest.mark.slow
def test_torchs_class_is_compiled_when_a_region_is_first_scripted(tmp_path):
    file = tmp_path / "fresh.py"
    file.write_text(FRESH)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "torch.bfloat16", "[<class 'torch.amp.autocast_mode.autocast'>]"]
