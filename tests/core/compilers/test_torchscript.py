"""polycast.autocast in a scripted function: the graph and the results of torch.autocast."""

import pytest
import torch
from torch.testing import FileCheck

import polycast
from polycast.torch_internals import private_names

A, B = torch.rand(2, 2), torch.rand(2, 2)
HALF, FLOAT, DOUBLE, BFLOAT = torch.float16, torch.float32, torch.float64, torch.bfloat16
TO_REDUCED, TO_FULL = "aten::_autocast_to_reduced_precision", "aten::_autocast_to_full_precision"
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


@case(BFLOAT)
def the_default_dtype(autocast):
    def f(a, b):
        with autocast("cpu"):
            return torch.mm(a, b)

    return f


@case(HALF)
def another_dtype(autocast):
    def f(a, b):
        with autocast("cpu", dtype=torch.float16, cache_enabled=False):
            return torch.mm(a, b)

    return f


@case(FLOAT)
def a_disabled_region(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16, enabled=False):
            return torch.mm(a, b)

    return f


@case(FLOAT)
def a_region_for_another_device(autocast):
    def f(a, b):
        with autocast("cuda", torch.float16):
            return torch.mm(a, b)

    return f


@case(BFLOAT)
def regions_for_two_devices(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            x = torch.mm(a, b)
            with autocast("cuda", torch.float16):
                return torch.mm(x, b)

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


@case(BFLOAT)
def regions_nested_in_one_statement(autocast):
    def f(a, b):
        with autocast("cpu", enabled=False), autocast("cpu", torch.bfloat16):
            return torch.mm(a, b)

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


@case(BFLOAT)
def an_instance_that_is_named(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16) as region:  # noqa: F841
            return torch.mm(a, b)

    return f


@case(BFLOAT, FLOAT)  # the JIT takes a product whose dtype it cannot tell to float32
def branches_in_a_region(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            if bool(a[0][0] > 2):
                x, y = torch.mm(a, a), 1
            else:
                x, y = torch.mm(a, b), 2
            return x, torch.mm(x, b) * y

    return f


@case(FLOAT)
def branches_of_two_dtypes(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            if bool(a[0][0] > 2):
                x, y = torch.mm(a, b), torch.mm(a, b).float()
            else:
                x, y = torch.mm(a, b).float(), torch.mm(a, b)
        return torch.mm(x.float(), y.float())

    return f


@case(FLOAT)
def branches_with_regions_of_their_own(autocast):
    def f(a, b):
        on = autocast("cpu", enabled=True)
        off = autocast("cpu", enabled=False)
        if bool(a[0][0] > 2):
            with on:
                x = torch.mm(a, b)
        else:
            with off:
                x = torch.mm(b, a)
        return torch.mm(x, x)

    return f


@case(BFLOAT)
def callees_in_a_region(autocast):
    def product(a, b):
        return torch.mm(a, b)

    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            return product(product(a, b), b)

    return f


@case(BFLOAT)
def a_callee_with_a_region(autocast):
    def product(a, b):
        with autocast("cpu", torch.bfloat16):
            return torch.mm(a, b)

    def f(a, b):
        with autocast("cpu", enabled=False):
            return product(a, b)

    return f


@case(FLOAT)
def a_callee_with_a_disabled_region(autocast):
    def product(a, b):
        with autocast("cpu", enabled=False):
            return torch.mm(a, b)

    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            return product(a, b)

    return f


@case(FLOAT, DOUBLE, DOUBLE)
def casts_by_hand(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            x = torch.mm(a.double(), b.double()).float()
            y = torch.mm(a, b).double()
        return x, y, torch.mm(a.double(), y)

    return f


@case(BFLOAT, BFLOAT)
def one_tensor_as_both_inputs(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            x = torch.mm(a, a)
            return x, torch.mm(x, x)

    return f


@case(FLOAT, FLOAT, DOUBLE)
def ops_for_float32(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            return torch.log(a.to(torch.bfloat16)), torch.exp(torch.mm(a, b)), torch.log(a.double())

    return f


@case(FLOAT, DOUBLE)
def ops_that_promote(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            return torch.addcmul(torch.mm(a, b), a, b), torch.addcmul(a.double(), a.double(), b.double())

    return f


@case(BFLOAT, BFLOAT, DOUBLE)
def ops_that_take_a_dtype(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            x = torch.mm(a, b)
            return torch.softmax(x, 0), torch.softmax(x, 0, None), torch.softmax(x, 0, torch.float64)

    return f


@case(BFLOAT, FLOAT, FLOAT)
def ops_that_write_to_an_input(autocast):
    def f(a, b):
        c = a.clone()
        with autocast("cpu", torch.bfloat16):
            return torch.addmm(c, a, b), torch.addmm(c, a, b, out=c), c.addmm_(a, b)

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
def test_a_region_is_compiled_as_torchs_is(make, dtypes):
    by_torch, by_polycast = scripted(make)
    assert "torch.amp.autocast_mode.autocast = prim::CreateObject" in str(by_polycast.inlined_graph)
    assert str(by_polycast.inlined_graph) == str(by_torch.inlined_graph)
    assert str(by_polycast.graph_for(A, B)) == str(by_torch.graph_for(A, B))


@pytest.mark.parametrize(("make", "dtypes"), CASES)
def test_a_region_computes_what_torchs_does(engine, make, dtypes):
    by_torch, by_polycast = scripted(make)
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


def test_the_casts_are_in_the_optimized_graph():
    _, f = scripted(one_region)
    FileCheck().check_count(TO_REDUCED, 2, exactly=True).check("aten::mm").run(f.graph_for(A, B))
    _, f = scripted(ops_for_float32)
    FileCheck().check(TO_FULL).check("aten::log").run(f.graph_for(A, B))
    _, f = scripted(a_disabled_region)
    FileCheck().check_not(TO_REDUCED).run(f.graph_for(A, B))
