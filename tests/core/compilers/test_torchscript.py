"""polycast.autocast in a scripted function: the graph, the results and the refusals of torch.autocast."""

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


@case(FLOAT)
def a_callee_with_a_disabled_region(autocast):
    def product(a, b):
        with autocast("cpu", enabled=False):
            return torch.mm(a, b)

    def f(a, b):
        with autocast("cpu", torch.bfloat16):
            return product(a, b)

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


def test_the_casts_are_in_the_optimized_graph():
    _, f = scripted(one_region)
    FileCheck().check_count(TO_REDUCED, 2, exactly=True).check("aten::mm").run(f.graph_for(A, B))
    _, f = scripted(ops_for_float32)
    FileCheck().check(TO_FULL).check("aten::log").run(f.graph_for(A, B))
    _, f = scripted(a_disabled_region)
    FileCheck().check_not(TO_REDUCED).run(f.graph_for(A, B))


# TorchScript rejects the same uses of torch.autocast and of polycast.autocast.


def enabled_at_runtime(autocast):
    def f(a, b):
        with autocast("cpu", enabled=bool(a[0][0] > 2)):
            return torch.mm(a, b)

    return f


def one_of_two_regions(autocast):
    def f(a, b):
        on = autocast("cpu", enabled=True)
        off = autocast("cpu", enabled=False)
        with on if bool(a[0][0] > 2) else off:
            return torch.mm(a, b)

    return f


def a_named_instance_entered_again(autocast):
    def f(a, b):
        with autocast("cpu") as region:
            x = torch.mm(a, b)
            with region:
                return torch.mm(x, b)

    return f


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (enabled_at_runtime, "Autocast _enabled argument must be a constant"),
        (one_of_two_regions, "Unsupported autocast syntax"),
        (a_named_instance_entered_again, "`with autocast() as ...` is not supported"),
    ],
)
def test_a_region_that_only_a_run_would_tell_is_refused(make, message):
    for f in scripted(make):
        with pytest.raises(RuntimeError, match=message.replace("(", r"\(").replace(")", r"\)")):
            f(A, B)


def cached_casts(a, b):
    with polycast.autocast("cpu", torch.bfloat16, cache=None):
        return torch.mm(a, b)


def a_policy(a, b):
    with polycast.autocast("cpu", torch.bfloat16, policy=None):
        return torch.mm(a, b)


@pytest.mark.parametrize(("function", "argument"), [(cached_casts, "cache"), (a_policy, "policy")])
def test_what_torchs_autocast_does_not_take_is_refused(function, argument):
    with pytest.raises(RuntimeError, match=f"Keyword argument {argument} unknown"):
        torch.jit.script(function)


@pytest.mark.parametrize("autocast", [torch.autocast, polycast.autocast])
def test_a_decorated_function_is_refused(autocast):
    def f(a, b):
        return torch.mm(a, b)

    with pytest.raises(
        RuntimeError, match=r"TorchScript error: @autocast\(\) decorator is not supported in script mode"
    ):
        torch.jit.script(autocast("cpu")(f))


@pytest.mark.parametrize("autocast", [torch.autocast, polycast.autocast])
def test_a_decorator_of_a_method_is_not_seen(autocast):
    class Decorated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        @autocast("cpu")
        def forward(self, a):
            return self.linear(a)

    module = Decorated()
    assert (module(A).dtype, torch.jit.script(module)(A).dtype) == (BFLOAT, FLOAT)


class Own(polycast.autocast):
    pass


def test_a_subclass_is_not_taken_for_torchs():
    def f(a, b):
        with Own("cpu"):
            return torch.mm(a, b)

    assert not hasattr(Own, "_jit_override_qualname")
    with pytest.raises(RuntimeError, match="Own"):
        torch.jit.script(f)
