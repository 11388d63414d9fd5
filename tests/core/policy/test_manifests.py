"""Manifests of plugins: recipes by name before their modules are imported, broken plugins, and conflicts."""

import importlib
import os
import sys

import pytest

import polycast
from polycast.policy import manifests
from polycast.policy.recipe import all_recipes, read_recipe


@pytest.fixture
def offer(monkeypatch, tmp_path):
    """Return a function that installs packages, by name and source, which has a `plugin`, and other modules."""

    def offer(*packages, **modules):
        monkeypatch.syspath_prepend(str(tmp_path))
        for name, source in [*packages, *modules.items()]:
            monkeypatch.delitem(sys.modules, name, raising=False)
            (tmp_path / f"{name}.py").write_text(source)
        for name, _ in packages:
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[polycast.plugins]\n{name} = {name}:plugin\n")
        importlib.invalidate_caches()
        manifests.forget()

    yield offer
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    manifests.forget()


PLUGIN = "from polycast.plugin import Plugin\nplugin = Plugin(%s)\n"
MANIFEST = PLUGIN % "recipes={'af4': 'acme_recipes:Af4'}"
OTHER = PLUGIN % "recipes={'bf5': 'other_recipes:Bf5'}"
RECIPE = """
import polycast
class Af4(polycast.plugin.Recipe):
    kind = 'af4'
    plan_class = 'acme:Plan'
    ops = ('linear',)
"""
BF5 = RECIPE.replace("af4", "bf5").replace("Af4", "Bf5")


def test_a_recipe_of_a_plugin_is_known_by_name_before_its_module_is_imported(offer, tmp_path):
    offer(("acme", MANIFEST), ("other", OTHER), acme_recipes=RECIPE, other_recipes=BF5)
    assert read_recipe("bf5").kind == "bf5"
    assert "acme_recipes" not in sys.modules
    policy = polycast.Policy(modules={"head": "af4"})
    assert type(policy.modules["head"]).__module__ == "acme_recipes"
    del polycast.policy.recipe.kinds["af4"], polycast.policy.recipe.kinds["bf5"]


def test_two_plugins_with_one_kind_are_a_conflict(offer):
    offer(("acme", MANIFEST), ("other", MANIFEST))
    with pytest.raises(RuntimeError, match=r"Several plugins have 'af4' in recipes: acme \(acme\), other \(other\)\."):
        read_recipe("af4")


def test_polycasts_own_recipe_takes_precedence(offer, monkeypatch):
    sources = [(name, PLUGIN % f"recipes={{'af4': '{name}:plugin'}}") for name in ("acme", "other")]
    offer(*sources)
    monkeypatch.setattr(manifests, "PROJECT", "other")
    assert manifests.manifests().find("recipes", "af4") is sys.modules["other"].plugin


def test_a_kind_of_a_plugin_that_is_not_imported_is_taken(offer):
    offer(("acme", MANIFEST))
    text = r"Mine\.kind is 'af4', which is the kind of acme_recipes\.Af4: give it another"
    with pytest.raises(ValueError, match=text):
        type("Mine", (polycast.plugin.Recipe,), {"kind": "af4"})


@pytest.mark.parametrize("module", ["raise SystemExit(5)", "import no_such_module", RECIPE.replace("'af4'", "'nf5'")])
def test_a_recipe_that_cannot_be_imported_matters_only_where_it_is_named(offer, monkeypatch, tmp_path, module):
    offer(("acme", MANIFEST), acme_recipes=module)
    warning = r"Repair|which is the kind of"
    with pytest.raises((RuntimeError, ValueError), match=r"acme|Af4"):
        read_recipe("af4")
    monkeypatch.delitem(sys.modules, "acme_recipes", raising=False)
    with pytest.warns(UserWarning, match=warning), pytest.raises(ValueError, match=r"did you mean 'rounded'"):
        read_recipe("rouded")
    with pytest.warns(UserWarning, match=warning):
        assert "rounded" in {recipe.kind for recipe in all_recipes()}
    polycast.policy.recipe.kinds.pop("nf5", None)


def test_a_veto_that_cannot_be_imported_or_fails_is_left_out_with_a_warning(offer, int8_kernels):
    offer(("acme", PLUGIN % "vetoes=('acme:no', 'acme:fails')" + "def fails(*args): 1 / 0\n"))
    with pytest.warns(UserWarning, match=r"acme:no cannot be imported\. The plugin 'acme' of acme is broken"):
        vetoes = manifests.functions("vetoes")
    with pytest.warns(UserWarning, match=r"acme:fails, of a plugin, failed: ZeroDivisionError"):
        assert {veto.ask("cpu", "int8", "aten::mm", ()) for veto in vetoes[:1]} == {None}


def test_a_plugin_that_cannot_be_imported_names_the_missing_plugins_that_it_needs(offer):
    manifest = PLUGIN % "names={'new': 'acme:new'}, needs=('other', 'gone')"
    offer(("acme", manifest), ("other", OTHER))
    with pytest.raises(RuntimeError, match=r"It needs 'gone', which is not installed\.$"):
        polycast.__getattr__("new")


def test_what_interrupts_the_import_of_a_plugin_reaches_the_caller(offer, monkeypatch):
    offer(("acme", "raise MemoryError"))
    with pytest.raises(MemoryError):
        manifests.manifests()
    monkeypatch.setattr(manifests, "_read", lambda _: iter(()))
    assert manifests.manifests() == ()


def test_a_plugin_may_use_recipes_before_its_manifest_is_made(offer):
    offer(("acme", RECIPE + PLUGIN % "needs=['bf5']"))
    importlib.import_module("acme")
    assert [each.plugin.needs for each in manifests.manifests() if each.name == "acme"] == [["bf5"]]
    del polycast.policy.recipe.kinds["af4"]


@pytest.mark.parametrize("source", ["plugin = {}", "import warnings\nwarnings.warn('old')"], ids=["wrong", "warns"])
def test_a_warning_of_a_broken_plugin_that_is_an_error_is_raised_once(offer, source):
    offer(("acme", source))
    with pytest.raises(UserWarning, match=r"The plugin 'acme' of acme is broken"):
        manifests.manifests()
    assert "acme" in {manifest.name for manifest in manifests.manifests()}


@pytest.mark.parametrize("source", ["", "import warnings\nwarnings.warn('old')\n"], ids=["lacks it", "warns"])
def test_a_warning_of_a_function_that_cannot_be_imported_is_raised_once(offer, source):
    offer(("acme", PLUGIN % "vetoes=['acme_veto:veto']"), acme_veto=source)
    with pytest.raises(UserWarning, match=r"acme_veto:veto cannot be imported\. The plugin 'acme' of acme is broken"):
        manifests.functions("vetoes")
    assert "acme_veto:veto" not in {each.path for each in manifests.functions("vetoes")}


LOCKS = """
import importlib, sys, threading
import polycast
from polycast.policy.recipe import read_recipe

sys.imports, sys.waits = threading.Event(), threading.Event()
first = threading.Thread(target=importlib.import_module, args=("acme",), daemon=True)
first.start()
assert sys.imports.wait(60)
second = threading.Thread(target=lambda: found.append(read_recipe("af4").kind), daemon=True)
found = []
second.start()
first.join(20), second.join(20)
print(first.is_alive(), second.is_alive(), found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("importer", ["acme_manifest", "acme_recipes"])
def test_threads_do_not_wait_for_each_other_to_import_a_plugin_and_to_ask_for_one(offer, launch, tmp_path, importer):
    offer(("acme_manifest", MANIFEST), ("other", OTHER), acme_recipes=RECIPE, other_recipes=BF5)
    path = tmp_path / f"{importer}.py"
    path.write_text("import sys\nsys.waits.set()\nimport acme\n" + path.read_text())
    source = "import sys\nsys.imports.set()\nsys.waits.wait(60)\nfrom polycast.policy.recipe import read_recipe\n"
    (tmp_path / "acme.py").write_text(source + "read_recipe('bf5')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = launch(LOCKS, environment=environment)
    assert (done.stdout, done.stderr) == ("False False ['af4']\n", "")


def test_a_distribution_without_metadata_hides_no_plugin(offer, tmp_path):
    offer(("acme", MANIFEST), ("other", OTHER))
    (tmp_path / "acme-1.0.dist-info" / "METADATA").unlink()
    assert {"acme", "other"} <= {manifest.name for manifest in manifests.manifests()}


INVALID = [
    *({"recipes": None}, {"commands": {"a": 1}}, {"vetoes": "a:b"}, {"vetoes": (1,)}, {"slow_reasons": "a"}),
    *({"libraries": "a"}, {"needs": "b"}),
]


def test_a_manifest_of_other_types_is_refused(subtests):
    text = r"(recipes|commands) must map names|(vetoes|slow_reasons|libraries|needs) must be a sequence"
    for given in INVALID:
        with subtests.test(given=given), pytest.raises(TypeError, match=text):
            polycast.plugin.Plugin(**given)


@pytest.mark.parametrize("source", ["raise OSError('no driver')", "raise SystemExit(1)", "plugin = {}"])
def test_a_broken_plugin_breaks_itself_only(offer, source):
    offer(("acme", source), ("other", OTHER))
    with pytest.warns(UserWarning, match=r"The plugin 'acme' of acme is broken: \w+: .*Repair or uninstall acme\."):
        known = manifests.manifests()
    assert [manifest.problem.startswith("The plugin") for manifest in known if manifest.name == "acme"] == [True]
    assert any("bf5" in manifest.plugin.recipes for manifest in known)


def test_plugins_of_third_parties_are_ignored_without_discovery(offer, monkeypatch):
    offer(("acme", MANIFEST))
    monkeypatch.setenv("POLYCAST_DISCOVERY", "0")
    with pytest.raises(ValueError, match=r"'af4' is not a recipe"):
        read_recipe("af4")


def test_functions_are_not_kept_while_manifests_are_read(offer):
    source = "from polycast.policy import manifests\nassert list(manifests.functions('vetoes')) == []\n"
    source += PLUGIN % "vetoes=['acme:veto']" + "def veto(*args):\n    return None\n"
    offer(("acme", source))
    manifests.manifests()
    assert "acme:veto" in [each.path for each in manifests.functions("vetoes")]
