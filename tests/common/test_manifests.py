"""Manifests of plugins: recipes by name before their modules are imported, broken plugins, and conflicts."""

import importlib
import sys

import pytest

import polycast
from polycast.common import manifests
from polycast.policy.recipe import read_recipe


def offer(monkeypatch, tmp_path, *packages):
    """Install packages, each given as its name and its source, which has a `plugin`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, source in packages:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[polycast.plugins]\n{name} = {name}:plugin\n")
    importlib.invalidate_caches()
    manifests.manifests.cache_clear()


@pytest.fixture(autouse=True)
def _read_again():
    yield
    manifests.manifests.cache_clear()


MANIFEST = "from polycast.common.manifests import Plugin\nplugin = Plugin(recipes={'nf4': '%s:Nf4'})\n"
RECIPE = "import polycast\nclass Nf4(polycast.plugin.Recipe):\n    kind = 'nf4'\n    ops = ('linear',)\n"


def test_a_recipe_of_a_plugin_is_known_by_name_before_its_module_is_imported(monkeypatch, tmp_path):
    offer(monkeypatch, tmp_path, ("acme", MANIFEST % "acme_recipes"))
    (tmp_path / "acme_recipes.py").write_text(RECIPE)
    assert read_recipe("fastest").kind == "fastest"
    assert "acme_recipes" not in sys.modules
    policy = polycast.Policy(modules={"head": "nf4"})
    assert type(policy.modules["head"]).__module__ == "acme_recipes"
    del polycast.policy.recipe_base.kinds["nf4"]


def test_two_plugins_with_one_kind_are_a_conflict(monkeypatch, tmp_path):
    offer(monkeypatch, tmp_path, ("acme", MANIFEST % "acme_recipes"), ("other", MANIFEST % "other_recipes"))
    with pytest.raises(RuntimeError, match=r"Several plugins have 'nf4' in recipes: acme \(acme\), other \(other\)\."):
        read_recipe("nf4")


@pytest.mark.parametrize("source", ["raise OSError('no driver')", "raise SystemExit(1)", "plugin = {}"])
def test_a_broken_plugin_breaks_itself_only(monkeypatch, tmp_path, source):
    offer(monkeypatch, tmp_path, ("acme", source))
    with pytest.warns(UserWarning, match=r"The plugin 'acme' of acme is broken: \w+: .*Repair or uninstall acme\."):
        known = manifests.manifests()
    assert any("fastest" in manifest.recipes for manifest in known.values())


def test_plugins_of_third_parties_are_ignored_without_discovery(monkeypatch, tmp_path):
    offer(monkeypatch, tmp_path, ("acme", MANIFEST % "acme_recipes"))
    monkeypatch.setenv("POLYCAST_DISCOVERY", "0")
    with pytest.raises(ValueError, match=r"'nf4' is not a recipe"):
        read_recipe("nf4")
