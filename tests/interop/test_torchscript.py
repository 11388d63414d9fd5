"""polycast.autocast in a scripted function: the graph, the results and the refusals of torch.autocast."""

import io
import re
import subprocess
import sys

import pytest
import torch
from torch.testing import FileCheck

import polycast

# torch's own word on TorchScript as a whole; polycast's warnings stay errors.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

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


def test_the_casts_are_in_the_optimized_graph():
    _, f = scripted(one_region)
    FileCheck().check_count(TO_REDUCED, 2, exactly=True).check("aten::mm").run(f.graph_for(A, B))
    _, f = scripted(ops_for_float32)
    FileCheck().check(TO_FULL).check("aten::log").run(f.graph_for(A, B))
    _, f = scripted(a_disabled_region)
    FileCheck().check_not(TO_REDUCED).run(f.graph_for(A, B))


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


def kept_casts(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16, cache=None):
            return torch.mm(a, b)

    return f


def a_policy(autocast):
    def f(a, b):
        with autocast("cpu", torch.bfloat16, policy=None):
            return torch.mm(a, b)

    return f


@pytest.mark.parametrize(("make", "argument"), [(kept_casts, "cache"), (a_policy, "policy")])
def test_what_torchs_autocast_does_not_take_is_refused(make, argument):
    with pytest.raises(RuntimeError, match=f"Keyword argument {argument} unknown"):
        torch.jit.script(make(polycast.autocast))


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


def test_torchs_class_is_compiled_when_a_region_is_first_scripted(tmp_path):
    file = tmp_path / "fresh.py"
    file.write_text(FRESH)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "torch.bfloat16", "[<class 'torch.amp.autocast_mode.autocast'>]"]
