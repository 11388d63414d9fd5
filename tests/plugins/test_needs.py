"""Each plugin can be deleted, with those that need it; the others work without it."""

import importlib.metadata
import json
from pathlib import Path

import pytest

import polycast_plugins.observe
from polycast.common.lazy_names import places
from polycast.plugin import Plugin
from polycast.policy.manifests import _OF_PLUGINS

FOLDER = Path(polycast_plugins.observe.__file__).parents[1]
PLUGINS = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
MANIFESTS = {
    point.name: point.load()
    for point in importlib.metadata.distribution("polycast").entry_points.select(group="polycast.plugins")
}
WITHOUT = """
import importlib, importlib.metadata, json, pkgutil, sys, torch

deleted = set(sys.argv[1:])


class Deleted:
    @staticmethod
    def find_spec(name, path=None, target=None):
        parts = name.split(".")
        if parts[0] == "polycast_plugins" and len(parts) > 1 and parts[1] in deleted:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Deleted)
find = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **query: importlib.metadata.EntryPoints(
    point for point in find(**query) if point.value.partition(":")[0].split(".")[:2][-1] not in deleted
)
import polycast, polycast_plugins

failures = {}
for name in polycast.__all__:
    getattr(polycast, name)
for plugin in sorted({each.name for each in pkgutil.iter_modules(polycast_plugins.__path__)} - deleted):
    package = importlib.import_module(f"polycast_plugins.{plugin}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(OTHERS) and not ("cli" in deleted and module.name.endswith("_command")):
            try:
                importlib.import_module(module.name)
            except Exception as error:
                failures[module.name] = repr(error)
x = torch.ones(4, 4)
with polycast.autocast("cpu", policy={"mm": "fp32"}, cache=polycast.WeightCache()):
    assert torch.mm(x, x).dtype is torch.float32
    assert torch.nn.functional.linear(x, x).dtype is torch.bfloat16
print(json.dumps(failures))
"""
OTHERS = ("_triton", "lightning", "mlflow", "transformers", "wandb", "accelerate", "__main__")
"""The ends of the names of modules that need a library which may be absent, or that are programs."""


@pytest.fixture(scope="module")
def launcher(start_launcher):
    """Return a function that runs a script in a process that has imported torch only."""
    return start_launcher("import torch")


def needed_by(plugin):
    """Return the plugins that need a plugin, directly or not."""
    found = {name for name, manifest in MANIFESTS.items() if plugin in manifest.needs}
    return found.union(*map(needed_by, found))


def test_each_manifest_needs_plugins_that_exist():
    assert all(isinstance(each, Plugin) for each in MANIFESTS.values())
    assert {need for each in MANIFESTS.values() for need in each.needs} - set(PLUGINS) == set()


def test_the_core_knows_whose_a_name_of_an_absent_plugin_is():
    stub = {name: place for name, place in places("polycast").items() if not place.startswith(".")}
    names = {name: path for each in MANIFESTS.values() for name, path in each.names.items()}
    assert names == {name: f"{place}:{name}" for name, place in stub.items()}
    others = {name: plugin for plugin, each in MANIFESTS.items() for name in (*each.methods, *each.recipes)}
    assert others == _OF_PLUGINS


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_can_be_deleted_with_those_that_need_it(plugin, launcher):
    done = launcher(WITHOUT.replace("OTHERS", repr(OTHERS)), plugin, *sorted(needed_by(plugin)))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
