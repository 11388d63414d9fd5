"""Policy files that name the file of a calibration."""

import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import polycast
from polycast import Calibration, Int4, Int8, Policy
from polycast_plugins.precision import Tuned

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), Int8())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")

TEXT = """schema = 1

[modules]
0 = { recipe = "int8", min_size = 0, calibration = "factors/e.safetensors" }

[devices.cpu.modules]
1 = { recipe = "int4", group_size = 64, calibration = "factors/e.safetensors" }
"""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


@pytest.fixture(scope="module")
def x():
    torch.manual_seed(1)
    x = torch.randn(16, 96)
    x[:, 3] *= 300
    return x


@pytest.fixture(scope="module")
def made(model, x):
    return polycast.calibrate(model, [x], Int8(min_size=0))


@pytest.fixture
def e(made, tmp_path):
    """Return a calibration in a file in a folder beside the policy file."""
    (tmp_path / "factors").mkdir()
    made = Calibration(made.weights)
    made.save(tmp_path / "factors" / "e.safetensors")
    return made


@pytest.fixture
def policy(e):
    return Policy(
        modules={"0": Int8(min_size=0, calibration=e)},
        devices={"cpu": Policy(modules={"1": Int4(64, calibration=e)})},
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "policy.toml"


def test_a_file_names_it_by_a_path_from_its_own_folder(path, policy, e, monkeypatch, tmp_path_factory):
    path.write_text(TEXT)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    loaded = Policy.load(path)
    assert loaded == policy
    assert hash(loaded) == hash(policy)
    found = loaded.modules["0"].calibration
    assert found.path == e.path == str(path.parent / "factors" / "e.safetensors")
    assert isinstance(found, Calibration)
    assert found == e
    assert loaded.devices["cpu"].modules["1"].calibration is found


@pytest.mark.parametrize("again", [Policy.load, lambda path: pickle.loads(pickle.dumps(Policy.load(path)))])
def test_loading_and_saving_again_gives_the_same_text(path, policy, again):
    policy.save(path)
    assert path.read_text() == TEXT
    again(path).save(path)
    assert path.read_text() == TEXT


def test_a_policy_saved_in_another_folder_names_the_same_file(path, policy, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "policy.toml"
    policy.save(other)
    assert Policy.load(other) == policy
    assert "../" in other.read_text()


def test_symbolic_links_to_folders_and_files_are_followed(path, policy, e, tmp_path, tmp_path_factory):
    far = tmp_path_factory.mktemp("far") / "deeper" / "still"
    far.mkdir(parents=True)
    (tmp_path / "link").symlink_to(far)
    policy.save(tmp_path / "link" / "policy.toml")
    assert Policy.load(far / "policy.toml") == Policy.load(tmp_path / "link" / "policy.toml") == policy
    linked = tmp_path / "factors" / "linked.safetensors"
    linked.symlink_to(e.path)
    Policy(modules={"0": Int8(calibration=Calibration.load(linked))}).save(path)
    assert "factors/linked.safetensors" in path.read_text()


def test_files_beside_a_link_are_found(path, policy, e, tmp_path_factory):
    policy.save(path)
    blobs, snapshot = tmp_path_factory.mktemp("blobs"), tmp_path_factory.mktemp("snapshot")
    (snapshot / "factors").mkdir()
    for number, file in enumerate((path, Path(e.path))):
        (blobs / str(number)).write_bytes(file.read_bytes())
        file.unlink()
        (snapshot / file.relative_to(path.parent)).symlink_to(blobs / str(number))
    assert Policy.load(snapshot / path.name) == policy


def test_paths_in_a_file_begin_at_its_folder_also_if_a_link_leads_to_it(path, policy, tmp_path_factory):
    policy.save(path)
    link = tmp_path_factory.mktemp("links") / "policy.toml"
    link.symlink_to(path)
    assert Policy.load(link) == policy
    policy.save(link)
    assert link.is_symlink()
    assert path.read_text() == TEXT


def test_what_tune_found_is_saved_with_relative_paths(path, policy):
    found = Tuned(policy, SimpleNamespace(lines=lambda: ["a line"]))
    found.save(path)
    assert path.read_text().endswith(TEXT)
    assert policy.text() in found.text()


def test_a_text_has_the_absolute_path(policy, e, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert e.path in policy.text()
    assert Policy.of_text(policy.text()) == policy


def test_an_equal_calibration_of_another_file_makes_an_equal_policy(path, policy, e, tmp_path):
    copy = Calibration(e.weights)
    copy.save(tmp_path / "copy.safetensors")
    assert (copy == e, copy.path == e.path) == (True, False)
    assert Policy(modules={"0": Int8(min_size=0, calibration=copy)}) == policy.for_device("cuda")


def test_the_rule_computes_as_one_made_in_python(engine, path, policy, model, x):
    path.write_text(TEXT)
    results = {}
    for name, rules in {"file": Policy.load(path), "python": policy, "plain": {"0": Int8(min_size=0)}}.items():
        rules = rules if isinstance(rules, Policy) else Policy(modules=rules)
        with torch.no_grad(), polycast.apply_policy(model, rules.for_device("cuda")), polycast.autocast("cpu"):
            results[name] = model[0](x).float()
    expected = model[0](x).detach()
    error = {name: ((result - expected).norm(dim=0) / expected.norm(dim=0)).mean() for name, result in results.items()}
    assert torch.equal(results["file"], results["python"])
    assert not torch.equal(results["file"], results["plain"])
    assert error["file"] < error["plain"]


def test_a_calibration_that_equals_a_saved_or_a_loaded_one_is_written_with_its_path(path, e, tmp_path):
    equal = Policy(modules={"0": Int8(min_size=0, calibration=Calibration(e.weights))})
    equal.save(path)
    assert 'calibration = "factors/e.safetensors"' in path.read_text()
    moved = Path(e.path).rename(tmp_path / "moved.safetensors")
    loaded = Calibration.load(moved)
    assert loaded == e
    equal.save(path)
    assert 'calibration = "moved.safetensors"' in path.read_text()


def test_a_calibration_without_a_file_cannot_be_written(path, made):
    policy = Policy(modules={"0": Int8(calibration=Calibration(made.weights[1:]))})
    with pytest.raises(ValueError, match=r"has no file: save it first, with calibration\.save\(path\)"):
        policy.save(path)
    assert not path.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda path, e: path.unlink(),
        lambda path, e: Calibration(e.weights[:1]).save(path),
        lambda path, e: path.write_bytes(b"no tensors"),
    ],
    ids=["removed", "replaced", "damaged"],
)
def test_a_file_that_no_longer_has_it_is_not_written(path, policy, e, change):
    change(Path(e.path), e)
    with pytest.raises(ValueError, match=rf"is no longer in '{re.escape(e.path)}': save it again"):
        policy.save(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Path.unlink, "its calibration cannot be read: [Errno 2] No such file or directory: '{file}'"),
        (lambda file: file.write_text("text"), "'{file}' is no calibration: "),
    ],
    ids=["missing", "something else"],
)
def test_a_file_that_is_missing_or_something_else_is_refused(path, e, change, reason):
    path.write_text(TEXT)
    change(Path(e.path))
    reason = f"policy file '{path}': devices.cpu: modules['1']: {reason.format(file=e.path)}"
    with pytest.raises(ValueError, match="^" + re.escape(reason)):
        Policy.load(path)


@pytest.mark.parametrize(
    ("recipe", "value", "reason"),
    [
        ("int8", "3", r"calibration must be a Calibration, as polycast\.calibrate returns it, or None, got 3"),
        ("int8", '"."', "its calibration cannot be read: "),
        ("int8", '""', "its calibration cannot be read: "),
        ("float8", '"e.safetensors"', "the table of a recipe 'float8' has 'recipe', .*; got 'calibration'"),
    ],
)
def test_what_is_no_path_is_refused_and_so_is_one_of_another_recipe(path, recipe, value, reason):
    path.write_text(f'schema = 1\n[modules]\n0 = {{ recipe = "{recipe}", calibration = {value} }}\n')
    with pytest.raises(ValueError, match=rf"modules\['0'\]: {reason}"):
        Policy.load(path)


def test_a_recipe_takes_no_path(e):
    with pytest.raises(TypeError, match=r"or None, got '.*'\. polycast\.Calibration\.load reads a file$"):
        Int8(calibration=e.path)


def test_a_calibration_of_changed_weights_is_in_no_file(e, model):
    assert Calibration.load(e.path, model).path == e.path
    torch.manual_seed(1)
    changed = torch.nn.Sequential(*(torch.nn.Linear(96, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
    loaded = Calibration.load(e.path, changed)
    assert loaded != e
    assert loaded.path is None
