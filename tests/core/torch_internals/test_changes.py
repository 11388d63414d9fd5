"""The core's changes to torch: each row fits this torch, warns where it does not, and is undone by uninstall()."""

import fnmatch
import gc
import importlib
import pkgutil
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from tests.core.rounding import Rounded
from torch.utils.checkpoint import checkpoint

import polycast
from polycast.engine import installation
from polycast.torch_internals import changes
from polycast.torch_internals.patcher import Feature, _function

CORE = str(Path(polycast.__file__).parent)
FEATURES = {each.name: each for each in vars(changes).values() if isinstance(each, Feature)}
ROWS = [(name, *change) for name, feature in FEATURES.items() for change in feature.changes]
NAMES = [
    (feature, module, name)
    for feature, module, names, _ in ROWS
    for name in names
    if "*" not in name and not name.endswith(".python_type") and not FEATURES[feature].outlives_uninstall
]
"""The names of each row, except those that only some versions of torch have, and features that are undone by users."""
ADDED = ("torch.utils.checkpoint",)
"""Modules whose names are attributes of instances, which the changes add to the classes."""


NO_CODE = ("torch.ops", "torch._classes", "torch._dynamo.external_utils")
"""Modules with lazy attributes, and the one where Dynamo keeps constants of compiled code."""
COPIED = "torch._dynamo.variables.tensor.all_tensor_attrs"
"""Has the attributes that torch.Tensor had when Dynamo was imported, perhaps while a feature was made."""


def layer():
    return torch.nn.Linear(4, 4)


X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    gc.collect()  # writes are watched while a WeightCache is alive
    polycast.uninstall()
    yield
    torch.compiler.reset()


def owner_of(name):
    """Return the owner of a dotted name, and the last part of the name."""
    where, _, attribute = name.rpartition(".")
    parts = where.split(".")
    for count in range(len(parts), 0, -1):  # an attribute of the package may hide a module
        try:
            owner = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            owner = getattr(owner, part)
        return owner, attribute
    raise AssertionError(name)


def comes_from_polycast(value):
    kind = type(value)
    if kind in (staticmethod, classmethod):
        value, kind = value.__func__, type(value.__func__)
    if kind is property:
        value, kind = value.fget, type(value.fget)
    if kind is types.FunctionType:
        return value.__code__.co_filename.startswith(CORE)
    return kind.__module__.partition(".")[0] == "polycast"


def changed_in_torch():
    """Return the attributes of torch's modules and classes that come from polycast, by dotted names.

    Without regions, which torch.export leaves in a module when it has traced them.
    """
    found = {}
    seen = set()
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    for name, module in modules:
        if not isinstance(module, types.ModuleType) or name.startswith(NO_CODE):
            continue
        owners = [(name, module)]
        for attribute, value in list(vars(module).items()):
            if issubclass(type(value), type) and value.__module__ == name:
                owners.append((f"{name}.{attribute}", value))
                context = vars(value).get("_backward_cls")
                if context is not None:
                    owners.append((f"{name}.{attribute}._backward_cls", context))
        for where, owner in owners:
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for attribute, value in list(vars(owner).items()):
                if type(value) is polycast.autocast:
                    continue
                values = [value, *value.values()] if type(value) is dict and len(value) < 10_000 else [value]
                if f"{where}.{attribute}" != COPIED and any(map(comes_from_polycast, values)):
                    found[f"{where}.{attribute}"] = value
    return found


def use_everything():
    for name in {module for _, module, _, _ in ROWS}:
        importlib.import_module(name)
    model, cache = layer(), polycast.WeightCache()
    with polycast.autocast("cpu", policy={"mm": "fp32"}):
        checkpoint(model, X, use_reentrant=False).sum().backward()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        with polycast.autocast("cpu", policy={"softmax": "fp32"}, cache=cache):
            return model(x)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def plain(x):
        with polycast.autocast("cpu"):
            return model(x)

    with torch.no_grad():
        compiled(X)
        plain(X)
    with polycast.autocast("cpu"):
        torch.export.export(model, (X,), strict=False)
    polycast.apply_policy(torch.compile(layer(), backend="eager"), polycast.Policy(modules={"": "fp32"}))
    with polycast.autocast("cpu", recipe=Rounded()):
        pass

    class Scripted(torch.nn.Module):
        def forward(self, x):
            with polycast.autocast("cpu"):
                return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.script(Scripted())


@pytest.mark.slow
@pytest.mark.usefixtures("engine", "int8_kernels")
def test_uninstall_leaves_nothing_of_polycast_in_torch(monkeypatch):
    monkeypatch.setattr(installation, "caches_alive", ())  # a cache that another test leaves keeps the hooks on writes
    assert changed_in_torch() == {}
    before = list(sys.meta_path)
    use_everything()
    made_here = [name for name, row in FEATURES.items() if row.changes and not row.outlives_uninstall]
    assert [name for name in made_here if not FEATURES[name].is_made()] == []
    assert {name for _, _, name in NAMES} - set(changed_in_torch()) == set()
    polycast.uninstall()
    assert changed_in_torch() == {}
    assert [finder for finder in sys.meta_path if finder not in before] == []


@pytest.mark.slow
@pytest.mark.usefixtures("engine", "int8_kernels")
def test_all_that_is_changed_is_in_the_table():
    use_everything()
    declared = [name for _, _, names, _ in ROWS for name in names]
    found = changed_in_torch()
    tables = [value for value in (getattr(*owner_of(name), None) for _, _, name in NAMES) if isinstance(value, dict)]
    others = {name: value for name, value in found.items() if not any(value is table for table in tables)}
    assert [name for name in others if not any(fnmatch.fnmatch(name, each) for each in declared)] == []
    assert len(found) > 12


def test_compiled_functions_run_after_uninstall_and_later_compilations_change_torch_again():
    model, cache = layer(), polycast.WeightCache()

    def function(x):
        with polycast.autocast("cpu", policy={"linear": "fp32"}, cache=cache):
            return model(x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert compiled(X).dtype is torch.float32
        polycast.uninstall()
        assert compiled(X).dtype is torch.float32
        torch.compiler.reset()
        polycast.uninstall()
        assert compiled(X).dtype is torch.float32
    assert "torch._dynamo.output_graph.OutputGraph.call_user_compiler" in changed_in_torch()


def test_uninstall_restores_the_setup_context_of_functions():
    def make(name, base, **methods):
        return type(name, (base,), {key: staticmethod(method) for key, method in methods.items()})

    def setup_context(ctx, inputs, output):
        pass

    backward = polycast.custom_bwd(lambda ctx, gradient: 2 * gradient, device_type="cpu")
    forward = polycast.custom_fwd(lambda x: 2 * x, device_type="cpu")
    base = make("Base", torch.autograd.Function, setup_context=setup_context, backward=backward)
    inherits = make("Inherits", base, forward=forward)
    own = make("Own", base, forward=forward, setup_context=setup_context)
    theirs = vars(own)["setup_context"]
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        for function in (inherits, own):
            function.apply(x).sum().backward()
            assert comes_from_polycast(vars(function)["setup_context"])
        polycast.uninstall()
        assert vars(own)["setup_context"] is theirs
        assert "setup_context" not in vars(inherits)


def slow_where_inductor_is_imported(rows):
    """Return parameters for tests: a feature, a module of torch, and more."""
    return [
        pytest.param(*row, marks=[pytest.mark.slow] * row[1].startswith("torch._inductor"), id=f"{row[0]}-{at}")
        for at, row in enumerate(rows)
    ]


@pytest.mark.parametrize(("feature", "module", "names", "function"), slow_where_inductor_is_imported(ROWS))
def test_the_names_and_the_function_of_a_row_exist(feature, module, names, function):
    importlib.import_module(module)
    assert callable(_function(function))
    assert not FEATURES[feature].on_refusal or callable(_function(FEATURES[feature].on_refusal))
    for name in names:
        if "*" not in name and not name.startswith(ADDED):
            owner, attribute = owner_of(name)
            assert hasattr(owner, attribute), name


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("feature", "module", "name"), slow_where_inductor_is_imported(NAMES))
def test_a_torch_without_a_name_warns_of_the_loss_and_runs_plain_regions(feature, module, name, monkeypatch):
    importlib.import_module(module)
    if name.startswith(ADDED):
        name = name.rpartition(".")[0]
    owner, attribute = owner_of(name)
    if attribute == "__init__" or attribute not in vars(owner):  # every class has __init__
        name = name.rpartition(".")[0]
        owner, attribute = owner_of(name)
    with monkeypatch.context() as without:
        without.delattr(owner, attribute)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert not FEATURES[feature].make()
    (only,) = {str(warning.message) for warning in said}
    assert "of this torch" in only
    assert FEATURES[feature].lost in only
    model = layer()
    with polycast.autocast("cpu"):
        assert model(X).dtype is torch.bfloat16
        assert torch.compile(model, backend="aot_eager", fullgraph=True)(X).dtype is torch.bfloat16


def test_a_torch_whose_graphs_hold_no_policies_breaks_them_there_and_compiles_plain_regions(monkeypatch):
    from torch._dynamo.variables import ctx_manager

    knows_the_class = "python_type" in vars(ctx_manager.AutocastModeVariable)  # Dynamo does from torch 2.12 on
    monkeypatch.delattr(ctx_manager, "AutocastModeVariable")
    model = layer()

    def function(x, policy):
        with polycast.autocast("cpu", policy=policy):
            return model(x)

    with pytest.warns(
        UserWarning, match="AutocastModeVariable.*Regions with policy=, recipe= or cache= break the graph"
    ):
        plain = torch.compile(function, backend="aot_eager", fullgraph=knows_the_class)(X, None)
    assert plain.dtype is torch.bfloat16
    assert torch.compile(function, backend="aot_eager")(X, {"linear": "fp32"}).dtype is torch.float32
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graphs of this torch cannot hold policy="):
        torch.compile(function, backend="aot_eager", fullgraph=True)(X, {"linear": "fp32"})
    assert pkgutil.resolve_name(
        "torch._dynamo.variables.builder:AutocastModeVariable"
    )  # torch's own code has imported it
