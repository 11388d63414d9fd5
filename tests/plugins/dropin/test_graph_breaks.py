"""Graph breaks in regions of compiled functions while torch is patched: Dynamo makes and enters the regions again."""

import contextlib
import subprocess
import sys

import pytest
import torch
from tests.plugins.dropin.conftest import needs_its_signature
from torch._dynamo import graph_break

import polycast

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
X = torch.ones(2, 2)
HALF, BFLOAT = torch.float16, torch.bfloat16


def products(x):
    y = x @ x
    graph_break()
    return y, y @ y


def in_a_region(x):
    with torch.autocast("cpu"):
        y = x @ x
        graph_break()
        return y, y @ y


def with_every_argument(x):
    with torch.autocast("cpu", dtype=HALF, enabled=True, cache_enabled=False):
        y = x @ x
        graph_break()
        return y, y @ y


def at_a_print(x):
    with torch.autocast("cpu"):
        y = x @ x
        print("break")
        return y, y @ y


def at_a_branch(x):
    with torch.autocast("cpu"):
        y = x @ x
        return (y, y @ y) if y.sum() > 0 else (y, y)


def in_an_inner_function(x):
    def inner(x):
        y = x @ x
        graph_break()
        return y, y @ y

    with torch.autocast("cpu"):
        return inner(x)


def in_a_function_that_is_called(x):
    with torch.autocast("cpu"):
        return products(x)


def in_a_function_decorated_inside(x):
    return torch.autocast("cpu")(products)(x)


def in_a_function_decorated_by_autocast_decorator(x):
    return torch.amp.autocast_mode.autocast_decorator(torch.autocast("cpu"), products)(x)


def in_nested_regions(x):
    with torch.autocast("cpu"):
        with torch.autocast("cpu", enabled=False):
            y = x @ x
            graph_break()
            z = y @ y
        return y, z, z @ z


def and_below_the_region(x):
    with torch.autocast("cpu"):
        y = x @ x
        graph_break()
    return y, x @ x


def where_an_error_leaves_the_region(x):
    try:
        with torch.autocast("cpu"):
            y = x @ x
            graph_break()
            raise ValueError
    except ValueError:
        return y, x @ x


def in_a_loop(x):
    """Dynamo runs the whole function in the interpreter, and compiles the functions that it calls."""
    for _ in range(2):
        with torch.autocast("cpu"):
            y = x @ x
            graph_break()
            z = y @ y
    return y, z


def in_a_deprecated_region(x):
    with torch.cpu.amp.autocast():
        y = x @ x
        graph_break()
        return y, y @ y


def in_a_deprecated_region_in_a_loop(x):
    for _ in range(2):
        with torch.cpu.amp.autocast(dtype=HALF):
            y = x @ x
            graph_break()
            z = y @ y
    return y, z


def in_a_region_of_torchs_own(x):
    with torch.autocast("hpu", BFLOAT):
        y = x @ x
        graph_break()
        return y, torch.is_autocast_enabled("hpu")


FUNCTIONS = [
    in_a_region,
    with_every_argument,
    at_a_print,
    at_a_branch,
    in_an_inner_function,
    in_a_function_that_is_called,
    in_a_function_decorated_inside,
    in_a_function_decorated_by_autocast_decorator,
    in_nested_regions,
    and_below_the_region,
    where_an_error_leaves_the_region,
    in_a_loop,
    pytest.param(in_a_deprecated_region, marks=needs_its_signature),
    pytest.param(in_a_deprecated_region_in_a_loop, marks=needs_its_signature),
    in_a_region_of_torchs_own,
]


def kinds(values):
    return [value.dtype if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_region_continues_after_a_graph_break(function):
    seen = []
    for patching in (contextlib.nullcontext(), polycast.patch_torch()):
        torch.compiler.reset()
        with patching:
            compiled = torch.compile(function, backend="eager")
            seen += [kinds(compiled(X)), kinds(compiled(X))]
        assert not any(map(torch.is_autocast_enabled, ("cpu", "hpu")))
    assert seen == 4 * [kinds(function(X))]


@pytest.mark.usefixtures("patched", "engine")
def test_a_decorated_function_may_be_compiled():
    compiled = torch.compile(torch.autocast("cpu")(products), backend="eager")
    assert 2 * [kinds(compiled(X))] == [[BFLOAT, BFLOAT], kinds(compiled(X))]


@pytest.mark.usefixtures("patched", "engine")
def test_a_stored_region_can_be_an_argument_a_closure_or_an_attribute():
    stored = torch.autocast("cpu", HALF)

    def given(x, region):
        with region:
            y = x @ x
            graph_break()
            return y, y @ y

    class Module(torch.nn.Module):
        region = stored

        def forward(self, x):
            return given(x, self.region)

    for function in (lambda x: given(x, stored), Module()):
        compiled = torch.compile(function, backend="eager")
        assert 2 * [kinds(compiled(X))] == [[HALF, HALF], kinds(compiled(X))]
    assert kinds(torch.compile(given, backend="eager")(X, stored)) == [HALF, HALF]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("patched", "engine")
def test_a_region_of_a_subclass_continues_after_a_graph_break():
    class Half(torch.autocast):
        def __init__(self, device_type):
            super().__init__(device_type, HALF)

    def function(x):
        with Half("cpu"):
            y = x @ x
            graph_break()
            return y, y @ y

    compiled = torch.compile(function, backend="eager")
    assert 2 * [kinds(compiled(X))] == [[HALF, HALF], kinds(compiled(X))]


@pytest.mark.usefixtures("patched", "engine")
def test_the_interpreter_enters_polycasts_region_where_the_graph_is_broken():
    nesting = []

    @torch.compiler.disable
    def look():
        nesting.append(polycast.autocast_nesting("cpu"))

    def function(x):
        with torch.autocast("cpu"):
            y = x @ x
            look()
            return y @ y

    assert torch.compile(function, backend="eager")(X).dtype is BFLOAT
    assert nesting == [1]


@pytest.mark.slow
def test_a_graph_break_does_not_end_a_program_that_polycast_runs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import torch
@torch.compile(backend="eager")
def f(x):
    with torch.autocast("cpu"):
        y = x @ x
        print("break")
        return y @ y
print(f(torch.ones(2, 2)).dtype)
""")
    command = [sys.executable, "-m", "polycast", "run", "--quiet", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "break\ntorch.bfloat16\n"), done.stderr
