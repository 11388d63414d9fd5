"""polycast.autocast in scripted functions and modules: the graph and the results of torch.autocast."""

import io
import re
import subprocess
import sys

import pytest
import torch

import polycast
from polycast.torch_internals import private_names

A, B = torch.rand(2, 2), torch.rand(2, 2)
HALF, FLOAT, DOUBLE, BFLOAT = torch.float16, torch.float32, torch.float64, torch.bfloat16
CASES = []


def case(*dtypes):
    """Add a function, made for one autocast class, and the dtypes of what it returns for two float32 matrices."""

    def add(make):
        CASES.append(pytest.param(make, dtypes, id=make.__name__))
        return make

    return add


@case(BFLOAT)
def one_region(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            return torch.mm(a, b)

    return f


@case(BFLOAT, HALF, FLOAT, BFLOAT)
def regions_of_other_settings(autocast):
    def f(a, b):
        with autocast("cpu"):
            w = torch.mm(a, b)
        with autocast("cpu", dtype=torch.float16, cache_enabled=False):
            x = torch.mm(a, b)
        with autocast("cpu", torch.bfloat16, enabled=False):
            y = torch.mm(a, b)
        with autocast("cpu", torch.bfloat16), autocast("cuda", torch.float16):
            z = torch.mm(a, b)
        return w, x, y, z

    return f


@case(FLOAT, FLOAT, DOUBLE, FLOAT, DOUBLE, BFLOAT, FLOAT, FLOAT)
def ops_of_each_policy(autocast):
    def f(a, b):
        c, d = a.clone(), a.double()
        with autocast("cpu", torch.bfloat16):
            product = torch.mm(a, b)
            in_float32 = torch.log(a.to(torch.bfloat16)), torch.exp(product), torch.log(d)
            promoted = torch.addcmul(product, a, b), torch.addcmul(d, d, b.double())
            written = torch.addmm(c, a, b), torch.addmm(c, a, b, out=c), c.addmm_(a, b)
        return in_float32 + promoted + written

    return f


@case(FLOAT, BFLOAT, FLOAT)
def nested_regions(autocast):
    def f(a, b):
        with autocast("cpu", enabled=False):
            x = torch.mm(a, b)
            with autocast("cpu"):
                y = torch.mm(x, b)
                with autocast("cpu", enabled=False):
                    z = torch.mm(x, a)
        return x, y, z

    return f


@case(BFLOAT, BFLOAT, FLOAT)
def one_instance_entered_again(autocast):
    def f(a, b):
        region = autocast("cpu", torch.bfloat16)
        with region:
            x = torch.mm(a, b)
            with region:
                y = torch.mm(b, x)
        return x, y, torch.mm(a, b)

    return f


def scripted(make):
    """Return a function scripted with torch.autocast, and the same with polycast's."""
    return torch.jit.script(make(torch.autocast)), torch.jit.script(make(polycast.autocast))


def called(function):
    """Return what a call returns when the executor has seen two, and optimized the function for them."""
    for _ in range(3):
        result = function(A, B)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(("make", "dtypes"), CASES)
def test_a_region_is_compiled_as_torchs_is_and_computes_the_same(engine, make, dtypes):
    by_torch, by_polycast = scripted(make)
    assert "torch.amp.autocast_mode.autocast = prim::CreateObject" in str(by_polycast.inlined_graph)
    assert str(by_polycast.inlined_graph) == str(by_torch.inlined_graph)
    assert str(by_polycast.graph_for(A, B)) == str(by_torch.graph_for(A, B))
    expected = called(by_torch)
    polycast.install("cpu")
    actual = called(by_polycast)
    assert tuple(tensor.dtype for tensor in actual) == dtypes
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("name", ["_script_class_of", "_compile_class", "_no_source"])
def test_a_torch_that_cannot_compile_torchs_class_is_the_reason(name, monkeypatch):
    monkeypatch.setattr(private_names, name, None)
    with pytest.raises(RuntimeError, match=r"torch.jit.script of this torch .* use torch.autocast in functions"):
        torch.jit.script(one_region(polycast.autocast))


class Own(polycast.autocast):
    pass


def a_cache(a, b):
    with polycast.autocast("cpu", torch.bfloat16, cache=None):
        return torch.mm(a, b)


def a_policy(a, b):
    with polycast.autocast("cpu", torch.bfloat16, policy=None):
        return torch.mm(a, b)


def a_subclass(a, b):
    with Own("cpu"):
        return torch.mm(a, b)


REFUSED = [(a_cache, "argument cache unknown"), (a_policy, "argument policy unknown"), (a_subclass, "Own")]


@pytest.mark.parametrize(("function", "text"), REFUSED)
def test_what_torchs_autocast_does_not_take_is_refused(function, text):
    assert not hasattr(Own, "_jit_override_qualname")
    with pytest.raises(RuntimeError, match=text):
        torch.jit.script(function)


TO_REDUCED = "aten::_autocast_to_reduced_precision"


def layer(autocast):
    class Layer(torch.nn.Linear):
        def forward(self, x):
            with autocast("cpu", torch.bfloat16):
                return torch.nn.functional.linear(self.weight.mm(x), self.weight, self.bias)

    return torch.jit.script(Layer(2, 2))


def kinds(graph):
    """Return the kinds of a graph's nodes, which, unlike their types, do not count the modules scripted before."""
    return re.findall(r"(?:aten|prim)::\w+", str(graph))


def test_a_module_casts_as_with_torch():
    by_torch, by_polycast = layer(torch.autocast), layer(polycast.autocast)
    assert by_torch(A).dtype is by_polycast(A).dtype is BFLOAT
    assert TO_REDUCED in kinds(by_polycast.graph_for(A))
    assert kinds(by_polycast.graph_for(A)) == kinds(by_torch.graph_for(A))


def test_a_saved_module_is_torchs_own():
    file = io.BytesIO()
    torch.jit.save(layer(polycast.autocast), file)
    assert b"polycast.region" not in file.getvalue()
    file.seek(0)
    assert torch.jit.load(file)(A).dtype is BFLOAT


def test_a_module_that_holds_a_region_can_be_scripted():
    holder = torch.nn.Linear(2, 2)
    holder.region = polycast.autocast("cpu", torch.float16, enabled=False)
    held = torch.jit.script(holder).region
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
