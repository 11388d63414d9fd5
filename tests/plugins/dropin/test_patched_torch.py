"""torch's own uses of autocast while it is patched: checkpoint, compile, script, export."""

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
from tests.plugins.dropin.conftest import needs_its_signature
from torch.utils.checkpoint import checkpoint

import polycast

X = torch.ones(2, 2)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward_patched", [True, False])
@pytest.mark.parametrize("forward_patched", [True, False])
def test_checkpoints_are_recomputed_in_the_region_of_their_forward(reentrant, forward_patched, backward_patched):
    def patching(wanted):
        return polycast.patch_torch() if wanted else contextlib.nullcontext()

    dtypes = []

    def run(x):
        hidden = net[0](x)
        dtypes.append(hidden.dtype)
        return net[2](net[1](hidden))

    net, x = model(), torch.ones(3, 4, requires_grad=True)
    with patching(forward_patched), torch.autocast("cpu"):
        out = checkpoint(run, x, use_reentrant=reentrant)
    with patching(backward_patched):
        out.float().sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    plain, y = model(), torch.ones(3, 4, requires_grad=True)
    with polycast.autocast("cpu"):
        out = plain(y)
    out.float().sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.usefixtures("patched", "engine")
def test_data_parallel_runs_in_the_region():
    with torch.autocast("cpu"):
        assert torch.nn.DataParallel(model())(torch.ones(3, 4)).dtype is torch.bfloat16


def in_region(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x


def in_deprecated_region(x):
    with torch.cpu.amp.autocast():
        return x @ x


def in_region_given(x, region):
    with region:
        return x @ x


@pytest.mark.usefixtures("fresh_dynamo", "engine")
@pytest.mark.parametrize("function", [in_region, pytest.param(in_deprecated_region, marks=needs_its_signature)])
@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")
def test_torch_compile_takes_the_regions_of_a_function_into_its_graph_with_and_without_the_patch(function):
    for patching in (contextlib.nullcontext(), polycast.patch_torch(), contextlib.nullcontext()):
        with patching:
            assert torch.compile(function, backend="aot_eager", fullgraph=True)(X).dtype is torch.bfloat16
            assert not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("fresh_dynamo", "engine")
def test_torch_compile_takes_a_region_that_was_made_outside():
    compiled = torch.compile(in_region_given, backend="aot_eager", fullgraph=True)
    with polycast.patch_torch():
        assert compiled(X, torch.autocast("cpu", torch.float16)).dtype is torch.float16
        assert compiled(X, torch.autocast("cpu", enabled=False)).dtype is torch.float32


@pytest.mark.usefixtures("fresh_dynamo", "engine")
def test_a_compiled_model_runs_and_trains_in_a_region():
    net = model()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with polycast.patch_torch():
        with torch.autocast("cpu"):
            out = compiled(torch.ones(3, 4))
        out.float().sum().backward()
    assert out.dtype is torch.bfloat16
    assert net[0].weight.grad.dtype is torch.float32


def in_half_region(x):
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        return x @ x


def in_deprecated_half_region(x):
    with torch.cpu.amp.autocast(enabled=True, dtype=torch.float16):
        return x @ x


def in_deprecated_region_of_another_device(x):
    with torch.cuda.amp.autocast():
        return x @ x


SCRIPTED = [
    (in_region, "bfloat16"),
    (in_half_region, "float16"),
    pytest.param(in_deprecated_region, "bfloat16", marks=needs_its_signature),
    pytest.param(in_deprecated_half_region, "float16", marks=needs_its_signature),
    pytest.param(in_deprecated_region_of_another_device, "float32", marks=needs_its_signature),
]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.jit as a whole is deprecated
@pytest.mark.parametrize(("function", "dtype"), SCRIPTED)
def test_torch_jit_scripts_a_region_with_and_without_the_patch(function, dtype):
    graphs = set()
    for patching in (polycast.patch_torch(), contextlib.nullcontext(), polycast.patch_torch()):
        with patching:
            scripted = torch.jit.script(function)
            assert scripted(X).dtype is getattr(torch, dtype)
            graphs.add(str(scripted.graph))
    assert len(graphs) == 1


PROGRAM = """
import sys, warnings, torch, polycast
from torch.cuda.amp import autocast as imported_before
warnings.simplefilter("ignore")
assert "torch._dynamo.variables.torch" not in sys.modules
def main(x):
    with torch.autocast("cpu"):
        return x @ x
def deprecated(x):
    with torch.cpu.amp.autocast(dtype=torch.float16):
        return x @ x
def other_device(x):
    with imported_before():
        return x @ x
def dtypes(compile, functions):
    return [str(compile(f)(torch.ones(2, 2)).dtype)[6:] for f in functions]
def dynamo():
    torch._dynamo.reset()
    compile = torch.compile(backend="eager", fullgraph=True)
    return dtypes(compile, (main, deprecated, other_device))
def script():
    from torch.jit._state import _script_classes
    return [*dtypes(torch.jit.script, (main, deprecated)), *(cls.__module__ for cls in _script_classes)]
compile = globals()[sys.argv[1]]
with polycast.patch_torch():
    print(*compile())
print(*compile())
"""
COMPILED = {
    "dynamo": "bfloat16 float16 float32",
    "script": "bfloat16 float16 torch.amp.autocast_mode torch.cpu.amp.autocast_mode",
}


@pytest.mark.slow
@needs_its_signature
@pytest.mark.parametrize("compiler", COMPILED)
def test_a_compiler_that_is_used_while_patched_first_knows_torchs_classes_later(tmp_path, compiler):
    """Dynamo and TorchScript keep what they know of classes for the life of the process."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program, compiler], capture_output=True, text=True)
    assert done.stdout.splitlines() == [COMPILED[compiler]] * 2, done.stderr


@pytest.mark.usefixtures("patched", "engine")
def test_torch_jit_traces_the_casts_of_a_region():
    with warnings.catch_warnings(), torch.autocast("cpu", cache_enabled=False):
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(model().eval(), torch.ones(3, 4))
    assert traced(torch.ones(3, 4)).dtype is torch.bfloat16


@pytest.mark.usefixtures("patched", "engine", "fresh_dynamo")
@pytest.mark.parametrize("strict", [True, False])
def test_torch_export_exports_the_casts_of_a_region(strict):
    class Net(torch.nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x

    exported = torch.export.export(Net(), (X,), strict=strict)
    assert exported.module()(X).dtype is torch.bfloat16


GENERIC = """
import types, warnings, torch, polycast
torch.utils.rename_privateuse1_backend("gnu")
members = {"get_amp_supported_dtype": lambda: [torch.bfloat16], "is_available": lambda: True}
torch._register_device_module("gnu", types.SimpleNamespace(**members))
warnings.filterwarnings("ignore", "gnu: no package has a backend for it")
with polycast.patch_torch():
    with torch.autocast("gnu") as region:
        print(isinstance(region, polycast.autocast), polycast.autocast_nesting("gnu"), torch.get_autocast_dtype("gnu"))
print(torch.is_autocast_enabled("gnu"))
"""


def test_a_region_of_a_device_without_a_plugin_is_polycasts(run_program, engine):
    assert run_program(GENERIC, engine) == (0, "True 1 torch.bfloat16\nFalse\n", "")
