"""Use without the optional libraries: most of polycast works, and the rest names the extra that it lacks."""

import json
import subprocess
import sys

import pytest

from polycast.errors import missing_library
from polycast.plugin import manifests

BLOCK = """
import importlib.metadata, re, sys

def required(name, found):
    if name not in found:
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            lines = []
        for line in lines:
            if "extra ==" not in line:
                required(re.sub("[-_.]+", "-", re.match(r"[\\w.-]+", line)[0]).lower(), found)
    return found

needed = required("polycast", set())
blocked = {
    module for module, owners in importlib.metadata.packages_distributions().items()
    if not needed & {re.sub("[-_.]+", "-", owner).lower() for owner in owners}
} - {"numpy"}

class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocks())
assert {"rich", "typer", "safetensors", "tomli_w", "pytest"} <= blocked
"""


def run(script):
    done = subprocess.run([sys.executable, "-c", BLOCK + script], capture_output=True, text=True)
    assert done.stderr == "" or "building" in done.stderr or done.returncode, done.stderr
    return done


@pytest.mark.slow
def test_regions_policies_caches_observations_and_int8_need_no_extra(tmp_path):
    done = run(f"""
import torch, polycast
model = torch.nn.Linear(256, 256)
x = torch.ones(2, 256)
policy = polycast.Policy({{"linear": "fp32"}}, name="in float32")
cache = polycast.WeightCache()
with torch.no_grad():
    for settings in ({{}}, {{"policy": policy}}, {{"cache": cache}}, {{"cache": cache, "recipe": "int8"}}):
        with polycast.autocast("cpu", **settings):
            print(model(x).dtype)
with torch.no_grad(), polycast.observe() as seen, polycast.autocast("cpu"):
    model(x)
assert "linear" in str(seen)
cache.save({str(tmp_path / "model.safetensors")!r}, model)
assert str(polycast.backends()).lstrip().startswith("device")
assert "linear" in str(polycast.plugin.explain_op("linear", "cpu"))
polycast.grad_scaler("cpu")
""")
    dtypes = ["torch.bfloat16", "torch.float32", "torch.bfloat16", "torch.bfloat16"]
    assert (done.returncode, done.stdout.split()) == (0, dtypes), done.stderr


@pytest.mark.slow
def test_what_lacks_a_library_names_the_extra_that_has_it(tmp_path, subtests):
    done = run(f"""
import polycast, torch
cache, file = polycast.WeightCache(), {str(tmp_path / "file")!r}
model = torch.nn.Linear(8, 8)
with torch.no_grad(), polycast.autocast("cpu", cache=cache):
    model(torch.ones(1, 8))
cache.save(file, model)
for name, use in {{
    "report": lambda: polycast.compare(model, torch.ones(1, 8)),
    "files": lambda: polycast.Policy({{"mm": "fp32"}}).save(file + ".toml"),
    "files ": lambda: polycast.WeightCache.load(file, model),
}}.items():
    try:
        use()
    except (ImportError, RuntimeError) as error:
        print(name.strip(), "|", error)
import polycast_plugins.cli
polycast_plugins.cli.main()
""")
    said = [line.partition(" | ") for line in done.stdout.splitlines()]
    assert len(said) == 3
    for extra, _, text in [*said, ("cli", "", done.stderr)]:
        with subtests.test(extra=extra, text=text):
            assert f"which comes with polycast[{extra}]. Install it: pip install " in text
    assert (done.returncode, done.stderr.startswith("polycast: "), done.stderr.count("\n")) == (1, True, 1)


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Return a function that makes a distribution with an extra, installed from a place."""

    def make(origin):
        folder = tmp_path / "acme_kit-1.dist-info"
        folder.mkdir()
        requires = 'Requires-Dist: numpy; extra == "other"\nRequires-Dist: Acme.Absent >=2,<3; extra == "tools"\n'
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-kit\nVersion: 1\n{requires}")
        (folder / "entry_points.txt").write_text("[polycast.plugins]\nacme_kit = acme_kit:plugin\n")
        if origin is not None:
            (folder / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return make


ABSENT = ModuleNotFoundError("No module named 'acme_absent'", name="acme_absent")
ORIGINS = {
    "index": (None, '"acme-kit[tools]"'),
    "folder": ({"url": "file://{folder}", "dir_info": {}}, '"{folder}[tools]"'),
    "editable": ({"url": "file://{folder}", "dir_info": {"editable": True}}, '-e "{folder}[tools]"'),
    "deleted folder": ({"url": "file://{folder}/gone", "dir_info": {}}, '"Acme.Absent>=2,<3"'),
    "archive": ({"url": "https://host/a.whl", "archive_info": {}}, '"acme-kit[tools] @ https://host/a.whl"'),
    "repository": (
        {"url": "https://host/acme.git", "vcs_info": {"vcs": "git", "commit_id": "a1"}},
        '"acme-kit[tools] @ git+https://host/acme.git"',
    ),
}


@pytest.mark.parametrize("kind", ORIGINS)
def test_the_line_installs_from_where_the_distribution_came(acme, tmp_path, kind):
    origin, expected = ORIGINS[kind]
    folder = tmp_path / "my source"
    folder.mkdir()
    if origin is not None:
        origin = {**origin, "url": origin["url"].format(folder=str(folder).replace(" ", "%20"))}
    acme(origin)
    assert missing_library(ABSENT, "acme-kit") == (
        "This needs Acme.Absent, which comes with acme-kit[tools]. Install it: pip install "
        + expected.format(folder=folder)
    )


@pytest.mark.parametrize("name", ["acme_absent.part", "acme", "", None])
def test_other_modules_are_of_no_extra_nor_are_those_of_a_distribution_without_metadata(acme, name):
    acme(None)
    assert missing_library(ModuleNotFoundError(name=name), "acme-kit") == ""
    assert missing_library(ABSENT, "acme-nowhere") == ""


def test_a_plugin_of_others_names_its_extra(acme, fresh_manifests):
    folder = acme(None)
    (folder / "acme_kit.py").write_text(
        "from polycast.plugin import Plugin\nplugin = Plugin(names={'acme': 'acme_kit_tools:tool'})\n"
    )
    (folder / "acme_kit_tools.py").write_text("import acme_absent\n")
    found = next(each for each in manifests() if each.name == "acme_kit")
    expected = r"^acme_kit_tools:tool cannot be imported. This needs Acme.Absent, .* acme-kit\[tools\]"
    with pytest.raises(RuntimeError, match=expected):
        found.resolve("acme_kit_tools:tool")


@pytest.fixture
def fresh_manifests():
    """Read the manifests again in the test and after it."""
    from polycast.policy.manifests import forget

    forget()
    yield
    forget()
