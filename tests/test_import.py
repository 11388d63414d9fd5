"""``import polycast`` has no side effects: no plugin, no kernel, no state, no metadata."""

import importlib.metadata
import json
import os
import pydoc
import subprocess
import sys

import pytest

import polycast

SCRIPT = """
import importlib.metadata, json, os, sys, torch

DEVICES = torch._C._autocast_supported_devices()
KEYS = ["Autocast" + torch._C._dispatch_key_for_device(name) for name in DEVICES]
OPS = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")


def of_torch():
    dumps = [line for op in OPS for line in torch._C._dispatch_dump(op).splitlines() if line.startswith("Autocast")]
    return {
        "kernels": [torch._C._dispatch_get_registrations_for_dispatch_key(key) for key in KEYS] + dumps,
        "fallbacks": [torch._C._dispatch_has_backend_fallback(torch._C._parse_dispatch_key(key)) for key in KEYS],
        "enabled": [torch.is_autocast_enabled(name) for name in DEVICES],
        "dtypes": [str(torch.get_autocast_dtype(name)) for name in DEVICES],
        "nesting": [torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()],
        "objects": [id(torch.autocast), id(torch.amp.autocast), id(torch.amp.custom_fwd)],
    }


before, modules, reads = of_torch(), set(sys.modules), []
read = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **group: reads.append(group) or read(**group)
os.environ.update(ILLEGAL)
import polycast
for variable in ILLEGAL:
    del os.environ[variable]
answer = {"modules": sorted(set(sys.modules) - modules), "before": before, "after": of_torch(), "reads": len(reads)}
os.environ["POLYCAST_ENGINE"] = "reference"
polycast.install("cpu")
print(json.dumps({**answer, "used": of_torch(), "reads in use": len(reads)}))
"""


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("POLYCAST_")}


def run(script, **variables):
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, env={**ENVIRONMENT, **variables}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def seen():
    """The state of torch in a fresh interpreter before and after importing polycast, and after using it."""
    illegal = {f"POLYCAST_{name}": "," for name in ("BLOCK", "DISCOVERY", "ENGINE", "PROVIDER")}
    done = run(f"ILLEGAL = {illegal!r}\n{SCRIPT}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_importing_polycast_imports_no_library_of_plugins_and_no_compiler(seen):
    libraries = {name.partition(".")[0] for name in seen["modules"]}
    assert libraries.isdisjoint({"jinja2", "pluggy", "rich", "typer", "sklearn"})
    assert not any(name.startswith("torch._dynamo") for name in seen["modules"])


def test_importing_polycast_imports_only_what_exported_programs_need(seen):
    ours = {name.partition("polycast")[2] for name in seen["modules"] if name.startswith("polycast")}
    engine = {".engine", ".engine.casts", ".engine.casts.cached_cast"}
    assert ours == {"", ".common", ".common.lazy_names", *engine, ".errors", ".plugin"}


REGIONS = """
import sys, torch
before = set(sys.modules)
import polycast
layer, x = torch.nn.Linear(64, 64), torch.ones(2, 64)
with polycast.autocast("cpu"):
    layer(x)
with torch.no_grad(), polycast.autocast("cpu", cache=polycast.WeightCache(), policy={"mm": "fp32"}, recipe="int8"):
    layer(x)
with polycast.patch_torch(), torch.autocast("cpu"):
    layer(x)
print(sorted((set(sys.modules) - before).intersection(sys.stdlib_module_names)))
"""


@pytest.mark.slow
def test_regions_import_nothing_that_a_file_beside_the_script_may_shadow(engine):
    for _ in range(2):  # the first may compile C++, for which more is imported
        done = run(REGIONS, POLYCAST_ENGINE=engine)
        if done.stdout == "[]\n":
            break
    assert done.stdout == "[]\n", done.stderr


IN_COMPILED_CODE = """
import torch, polycast

@{}
def function(x):
    with polycast.autocast("cpu"):
        return x @ x

print(function(torch.ones(2, 2)).dtype)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ['torch.compile(backend="eager", fullgraph=True)', "torch.jit.script"])
def test_a_name_may_be_used_first_in_compiled_code(how, tmp_path):
    (tmp_path / "program.py").write_text(IN_COMPILED_CODE.format(how))  # scripts are compiled from their files
    done = run(f"import runpy; runpy.run_path({str(tmp_path / 'program.py')!r})")
    assert (done.returncode, done.stdout) == (0, "torch.bfloat16\n"), done.stderr


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(polycast, "compares")


def test_dir_and_help_show_the_public_names_only():
    shown = {name for name in dir(polycast) if not name.startswith("__")}
    assert shown == {*polycast.__all__, "errors", "plugin"}
    assert "__version__" in dir(polycast)
    first, second, *_ = polycast.__doc__.split("\n\n")
    assert first == "Autocast for PyTorch as a plugin system: mixed precision on any device."
    assert "PYTEST" not in second
    assert "PYTEST" not in pydoc.render_doc(polycast)


def test_the_core_has_few_public_names():
    assert len(polycast._own) <= 42
    assert len(polycast.plugin.__all__) <= 45


def test_version_is_that_of_the_distribution():
    assert polycast.__version__ == importlib.metadata.version("polycast")


def test_importing_polycast_reads_no_metadata_and_no_variable(seen):
    assert (seen["reads"], seen["reads in use"]) == (0, 2)  # those of backends, and of extensions


def test_importing_polycast_does_not_change_torch(seen):
    assert seen["after"] == seen["before"]


def test_installing_kernels_changes_torch(seen):
    assert seen["used"]["kernels"] != seen["before"]["kernels"]


REGION = """
import sys, torch, polycast

with polycast.autocast("cpu"):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
OURS = ("polycast", "polycast_backends", "polycast_plugins")
names = [name for name in sys.modules if name.partition(".")[0] in OURS]
files = [file for name in names if (file := getattr(sys.modules[name], "__file__", None)) is not None]
print(len(files), sum(len(open(file, encoding="utf-8").readlines()) for file in files), *sorted(names))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_plain_region_imports_what_it_uses(engine):
    modules, lines, *names = run(REGION, POLYCAST_ENGINE=engine).stdout.split()
    assert (int(modules) <= 85, int(lines) <= 8500) == (True, True), (modules, lines, names)
