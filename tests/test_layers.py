"""The architecture: the folders of the core, the imports between them, and the length of files and functions."""

import ast
import contextlib
import functools
import re
import sys

import pytest
import torch
from tests import sources
from tests.sources import CORE, PLUGINS, SOURCES, parsed
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast

GENERATED = {"docs/modules.md", "docs/benchmark-tables.md"}
LAYERS = [
    {"cli"},
    {"testing"},
    {"dropin", "integrations"},
    {"distributed", "out_dtype", "precision"},
    {"observe"},
    {"region"},
    {"fastest", "quantize"},
    {"compilers"},
    {"engine"},
    {"toolchain"},
    {"registry"},
    {"policy"},
    {"torch_internals"},
    {"common"},
    {"errors"},
]
"""The layers, from the top: plugins, and folders of the core. Each imports from lower layers only."""
MODULES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for root in (CORE, PLUGINS)
    for path in root.rglob("*.py")
    if path.parent != CORE or path.stem not in ("__init__", "__main__", "plugin")
}


def imports(module):
    """Return the modules of polycast that a module imports, anywhere in it."""
    found = {name.partition(".")[2] for name, _ in sources.imports(MODULES[module])}
    # Only the command line imports the modules of commands, which may import it.
    return found - {"", "plugin"} - ({"cli"} if module.endswith("_command") else set())


@functools.cache
def arrows():
    """Return the modules of polycast that each module imports."""
    return {module: imports(module) for module in MODULES}


def layer(module):
    folder = module.partition(".")[0]
    (number,) = (number for number, folders in enumerate(LAYERS) if folder in folders)
    return number


def test_every_folder_is_in_a_layer():
    assert {module.partition(".")[0] for module in MODULES} == set().union(*LAYERS)


def test_the_list_of_folders_can_be_read_at_a_glance():
    entries = {path.name for path in CORE.iterdir()} - {
        "__init__.py",
        "__main__.py",
        "plugin.py",
        "py.typed",
        "__pycache__",
    }
    assert len(entries) <= 18, entries


def test_modules_import_from_their_own_folder_and_from_lower_layers():
    upward = {
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in others
        if other.partition(".")[0] != module.partition(".")[0] and layer(other) <= layer(module)
    }
    assert upward == set()


def test_the_arrows_are_seen():
    assert {"engine.state", "compilers.dynamo", "compilers.export"} <= arrows()["region.autocast"]
    assert {"engine.choice", "toolchain.load"} <= arrows()["engine.native_library"]


def test_no_modules_import_each_other_on_any_way():
    below = {}

    def visit(module, way):
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in below:
            below[module] = [visit(other, [*way, module]) for other in arrows()[module] if other in arrows()]

    for module in MODULES:
        visit(module, [])


CALLS_UP = {
    "common.cached_property",
    "common.events",
    "region.autocast",  # calls a method of plugins
    "engine.recipes.operators",  # calls the plans of plugins
    "engine.recipes.plan",  # makes and calls the plans of plugins
    "policy.manifests",  # calls the functions that manifests name
    "policy.recipe",  # calls methods of the recipes of plugins
    "torch_internals.callers_state",  # calls methods of plugins
    "torch_internals.patcher",  # calls the functions that the table of changes names
}
"""The modules that call functions which higher layers have given them."""


def use_everything(model, x):
    """Use each folder, so that each way to call another folder is taken."""
    compiled = torch.compile(model, backend="aot_eager")
    for settings in ({}, {"policy": {"mm": "fp32"}}, {"cache": polycast.WeightCache()}, {"recipe": "int8"}):
        with polycast.autocast("cpu", **settings):
            checkpoint(model, x, use_reentrant=False).sum().backward()
            checkpoint(compiled, x, use_reentrant=False).sum().backward()
            with torch.no_grad():
                model(x), compiled(x)
    with polycast.apply_policy(model, polycast.Policy(modules={"0": "fp32"})), polycast.autocast("cpu"):
        with polycast.observe(model, timing=True, stacks=True) as seen:
            model(x)
        seen.to_dict()
        polycast.explain("mm", x, x, device_type="cpu")
    polycast.tune(model, x, tolerance=1.0, device_type="cpu")
    with polycast.patch_torch(), torch.autocast("cpu"):
        model(x)
    with polycast.register_op("aten::tanh", "fp32"), polycast.capture().apply():
        x.tanh()
    polycast.clear_autocast_cache()
    polycast.uninstall()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::polycast.errors.RecipeDisabledWarning")  # of a processor without int8
def test_layers_call_upwards_only_through_callbacks():
    upwards = set()

    def module_of(frame):
        return frame.f_globals.get("__name__", "").removeprefix("polycast.").removeprefix("polycast_plugins.")

    def note(frame, event, _):
        if event != "call" or "polycast" not in frame.f_globals.get("__name__", "") or frame.f_back is None:
            return
        caller, called = module_of(frame.f_back), module_of(frame)
        if caller in MODULES and called in MODULES:
            is_other_folder = caller.partition(".")[0] != called.partition(".")[0]
            if is_other_folder and layer(called) <= layer(caller):
                upwards.add((caller, called))

    with contextlib.ExitStack() as stack:
        stack.callback(torch.compiler.reset)
        stack.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(note)
        use_everything(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8))
    from_cpp = {(caller, called) for caller, called in upwards if called.startswith("observe.")}
    # Not equal: what earlier tests have computed is not computed again.
    assert {caller for caller, _ in upwards - from_cpp} <= CALLS_UP
    assert "common.events" in {caller for caller, _ in upwards}
    assert {called for caller, called in from_cpp if caller not in CALLS_UP} <= {"observe.observer_library"}


def test_folders_say_what_they_are_for():
    packages = {path.parent / "__init__.py" for path in MODULES.values()}
    assert [path for path in packages if not ast.get_docstring(parsed(path))] == []


FOLDERS = ("backends", "benchmarks", "core", "docs", "examples", "plugins", "tests", "tools")


def lines_of(function):
    """Return the number of lines of a function without its signature and docstring."""
    body = function.body[ast.get_docstring(function) is not None :] or function.body
    return body[-1].end_lineno - body[0].lineno + 1


BOUNDS = [("core", ".py", 15_673), ("core", ".h .cpp", 7_052), ("core backends plugins", ".py", 41_344)]
"""Folders, kinds of files, and their lines at most, docstrings and comments included. A change that needs more says
what users gain by it."""


@pytest.mark.parametrize(("folders", "suffixes", "most"), BOUNDS)
def test_the_code_fits_its_bounds(folders, suffixes, most):
    paths = (path for folder in folders.split() for path in (SOURCES / folder).rglob("*.*"))
    sizes = [path.read_text(encoding="utf-8").count("\n") for path in paths if path.suffix in suffixes.split()]
    assert 0 < sum(sizes) <= most


def test_functions_fit_on_a_screen():
    long = {
        f"{path.relative_to(SOURCES)}:{node.lineno} {node.name}"
        for folder in FOLDERS
        for path in (SOURCES / folder).rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and lines_of(node) > 60
    }
    assert long == set()


def test_no_file_has_more_than_350_lines():
    written = {".py", ".h", ".cpp", ".md", ".js", ".css", ".html", ".template"}
    paths = {path.relative_to(SOURCES).as_posix(): path for each in FOLDERS for path in (SOURCES / each).rglob("*.*")}
    lines = {
        name: path.read_text(encoding="utf-8").count("\n")
        for name, path in paths.items()
        if path.suffix in written and name not in GENERATED
    }
    assert {name: count for name, count in lines.items() if count > 350} == {}
    assert {name.partition("/")[0] for name in lines} == set(FOLDERS)


HOST_AND_ACCELERATORS = {"cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla"}
MAY_NAME_A_DEVICE = {
    "quantize/cpu/__init__.py": "the device that it extends",
    "quantize/cuda/__init__.py": "the device that it extends",
    "distributed/__init__.py": "the device of a process group without an accelerator",
    "engine/overlap.py": "a mask is in host memory",
    "precision/evidence.py": "the processor of the machine",
    "quantize/unfused.py": "ops that torch fuses on the CPU only",
    "observe/step_log.py": "the generator of the host's random numbers",
    "precision/runs.py": "torch's default device is thread-local",
    "fastest/operands.py": "the numbers are drawn on the host",
    "fastest/profile_command.py": "the default of a command",
    "fastest/stopwatch.py": "the load of the host's processors",
    "observe/grad_scaler.py": "the default of torch.amp.GradScaler; values in host memory are read without waiting",
    "torch_internals/dispatcher.py": "the fallback for torch's list of devices",
}
"""The modules of the core, besides the command and the conformance suite, that name a device, and why."""


def test_the_core_names_no_device_but_in_the_listed_modules():
    found = set()
    for path in [*CORE.rglob("*.py"), *PLUGINS.rglob("*.py")]:
        name = path.relative_to(PLUGINS if path.is_relative_to(PLUGINS) else CORE).as_posix()
        constants = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant))
        if not name.startswith(("cli/", "testing/")) and any(
            each.value in HOST_AND_ACCELERATORS for each in constants if isinstance(each.value, str)
        ):
            found.add(name)
    assert found == set(MAY_NAME_A_DEVICE)


def test_the_engine_in_cpp_names_no_accelerator():
    accelerators = r"\b(?:k|Autocast|is_)?(?:CUDA|XPU|MPS|MTIA|MAIA|HPU|IPU|XLA|cuda|xpu|mps|mtia|maia)\b"
    sources = [path for root in (CORE, PLUGINS) for path in root.rglob("*") if path.suffix in (".h", ".cpp")]
    code = {path: re.sub(r"//.*", "", path.read_text(encoding="utf-8")) for path in sources}
    assert [path.name for path, text in code.items() if re.search(accelerators, text)] == []


MAY_SHARE_A_FILE_NAME = {
    # A module of cli is named after its command, and so is the module that the command runs.
    "build.py": {"cli.build", "toolchain.build"},
    # Two implementations of one interface.
    "engine.py": {"engine.native.engine", "engine.reference.engine"},
}


def test_no_two_modules_of_the_core_share_a_file_name_but_the_listed_ones():
    where = {}
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            where.setdefault(path.name, set()).add(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == MAY_SHARE_A_FILE_NAME


def test_no_two_classes_of_the_core_share_a_name():
    where = {}
    for module, path in MODULES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


def test_only_one_header_of_recipes_is_included_by_the_rest_of_the_engine():
    engine = CORE / "engine" / "native"
    recipes = {path.name for path in (engine / "recipes").iterdir()}
    others = [
        path for folder in (engine, engine / "common") for path in folder.iterdir() if path.suffix in (".h", ".cpp")
    ]
    included = {path.name: set(re.findall(r'#include "(.*)"', path.read_text(encoding="utf-8"))) for path in others}
    found = {name: headers & recipes for name, headers in included.items() if headers & recipes}
    assert found == {"kernel.h": {"recipe_call.h"}}
