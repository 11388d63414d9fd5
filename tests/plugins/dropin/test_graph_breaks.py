"""Graph breaks in regions of compiled functions while torch is patched: Dynamo makes and enters the regions again."""

import contextlib
import inspect
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


def around(make, returned=lambda y: y @ y):
    """Return a function with a graph break in a region, which another function makes."""

    def function(x):
        with make():
            y = x @ x
            graph_break()
            return y, returned(y)

    return function


def in_a_loop(make):
    """Return a function that Dynamo runs in the interpreter: it compiles the functions that it calls."""

    def function(x):
        for _ in range(2):
            with make():
                y = x @ x
                graph_break()
                z = y @ y
        return y, z

    return function


def in_the_function_itself(x):
    with torch.autocast("cpu"):
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


def in_a_function_that_is_called(x):
    with torch.autocast("cpu"):
        return products(x)


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


def half_region():
    return torch.autocast("cpu", dtype=HALF, enabled=True, cache_enabled=False)


FUNCTIONS = {
    "in the function itself": in_the_function_itself,
    "at a print": at_a_print,
    "at a branch": at_a_branch,
    "in a function that is called": in_a_function_that_is_called,
    "in a function decorated inside": lambda x: torch.autocast("cpu")(products)(x),
    "in one decorated by autocast_decorator": (
        lambda x: torch.amp.autocast_mode.autocast_decorator(torch.autocast("cpu"), products)(x)
    ),
    "in nested regions": in_nested_regions,
    "and below the region": and_below_the_region,
    "where an error leaves the region": where_an_error_leaves_the_region,
    "with every argument": around(half_region),
    "in a region of torch's own": around(
        lambda: torch.autocast("hpu", BFLOAT), lambda y: torch.is_autocast_enabled("hpu")
    ),
    "in a loop": in_a_loop(lambda: torch.autocast("cpu")),
}
DEPRECATED = {
    "in a deprecated region": around(lambda: torch.cpu.amp.autocast()),
    "in a deprecated region in a loop": in_a_loop(lambda: torch.cpu.amp.autocast(dtype=HALF)),
}


def kinds(values):
    return [value.dtype if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", [*FUNCTIONS, *(pytest.param(each, marks=needs_its_signature) for each in DEPRECATED)])
def test_a_region_continues_after_a_graph_break(name):
    function, seen = (FUNCTIONS | DEPRECATED)[name], []
    for patching in (contextlib.nullcontext(), polycast.patch_torch()):
        torch.compiler.reset()
        with patching:
            compiled = torch.compile(function, backend="eager")
            seen += [kinds(compiled(X)), kinds(compiled(X))]
        assert not any(map(torch.is_autocast_enabled, ("cpu", "hpu")))
    assert seen == 4 * [kinds(function(X))]


def compiled_kinds(function, *args):
    """Return what two calls of a compiled function return, which must be equal."""
    compiled = torch.compile(function, backend="eager")
    first, second = kinds(compiled(X, *args)), kinds(compiled(X, *args))
    assert first == second
    return first


@pytest.mark.usefixtures("patched", "engine")
def test_a_decorated_function_may_be_compiled():
    assert compiled_kinds(torch.autocast("cpu")(products)) == [BFLOAT, BFLOAT]


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

    for function, *args in ((given, stored), (lambda x: given(x, stored),), (Module(),)):
        assert compiled_kinds(function, *args) == [HALF, HALF]


@pytest.mark.usefixtures("patched", "engine")
def test_a_region_of_a_subclass_continues_after_a_graph_break():
    class Half(torch.autocast):
        def __init__(self, device_type):
            super().__init__(device_type, HALF)

    assert compiled_kinds(around(lambda: Half("cpu"))) == [HALF, HALF]


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
    program.write_text(f"""
import torch
@torch.compile(backend="eager")
{inspect.getsource(at_a_print)}
print(at_a_print(torch.ones(2, 2))[1].dtype)
""")
    command = [sys.executable, "-m", "polycast", "run", "--quiet", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "break\ntorch.bfloat16\n"), done.stderr
