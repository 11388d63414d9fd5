"""Policy files that name the file of a calibration."""

import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

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


def test_loading_and_saving_again_gives_the_same_text(path, policy):
    policy.save(path)
    assert path.read_text() == TEXT
    Policy.load(path).save(path)
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


def test_rules_that_name_one_file_share_it(path, e):
    path.write_text(TEXT)
    loaded = Policy.load(path)
    assert loaded.modules["0"].calibration is loaded.devices["cpu"].modules["1"].calibration


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


def test_a_calibration_that_equals_a_saved_one_is_written_with_its_path(path, e):
    Policy(modules={"0": Int8(min_size=0, calibration=Calibration(e.weights))}).save(path)
    assert 'calibration = "factors/e.safetensors"' in path.read_text()


def test_a_calibration_that_equals_a_loaded_one_is_written_with_its_path(path, e, tmp_path):
    moved = tmp_path / "moved.safetensors"
    (tmp_path / "factors" / "e.safetensors").rename(moved)
    loaded = Calibration.load(moved)
    Policy(modules={"0": Int8(min_size=0, calibration=Calibration(loaded.weights))}).save(path)
    assert 'calibration = "moved.safetensors"' in path.read_text()


def test_a_calibration_without_a_file_cannot_be_written(path, made):
    policy = Policy(modules={"0": Int8(calibration=Calibration(made.weights[1:]))})
    with pytest.raises(ValueError, match=r"has no file: save it first, with calibration\.save\(path\)"):
        policy.save(path)
    assert not path.exists()


@pytest.mark.parametrize("change", ["removed", "replaced", "damaged"])
def test_a_file_that_no_longer_has_it_is_not_written(path, policy, e, change):
    if change == "removed":
        (path.parent / "factors" / "e.safetensors").unlink()
    elif change == "replaced":
        Calibration(e.weights[:1]).save(e.path)
    else:
        (path.parent / "factors" / "e.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=rf"is no longer in '{re.escape(e.path)}': save it again"):
        policy.save(path)


def foreign(file, e):
    save_file({"weight": torch.ones(2)}, file)


def damaged(file, e):
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda file, e: file.unlink(),
            "its calibration cannot be read: [Errno 2] No such file or directory: '{file}'",
        ),
        (foreign, "'{file}' is a safetensors file, but not a calibration that polycast saved"),
        (damaged, "'{file}' is damaged: its contents do not have the digest that it says"),
        (lambda file, e: file.write_text("text"), "'{file}' is no calibration: "),
    ],
)
def test_a_file_that_is_missing_or_something_else_is_refused(path, e, change, reason):
    path.write_text(TEXT)
    file = path.parent / "factors" / "e.safetensors"
    change(file, e)
    reason = f"policy file '{path}': devices.cpu: modules['1']: {reason.format(file=file)}"
    with pytest.raises(ValueError, match="^" + re.escape(reason)):
        Policy.load(path)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("3", "modules['0']: calibration must be a Calibration, as polycast.calibrate returns it, or None, got 3"),
        ('"."', "modules['0']: its calibration cannot be read: "),
        ('""', "modules['0']: its calibration cannot be read: "),
    ],
)
def test_what_is_no_path_is_refused(path, value, reason):
    path.write_text(f'schema = 1\n[modules]\n0 = {{ recipe = "int8", calibration = {value} }}\n')
    with pytest.raises(ValueError, match=re.escape(reason)):
        Policy.load(path)


def test_a_recipe_without_the_setting_has_no_file(path):
    path.write_text('schema = 1\n[modules]\n0 = { recipe = "float8", calibration = "e.safetensors" }\n')
    with pytest.raises(ValueError, match="the table of a recipe 'float8' has 'recipe', .*; got 'calibration'"):
        Policy.load(path)


def test_a_recipe_takes_no_path(e):
    with pytest.raises(TypeError, match=r"or None, got '.*'\. polycast\.Calibration\.load reads a file$"):
        Int8(calibration=e.path)


def test_without_a_model_it_is_loaded_for_the_weights_that_it_was_made_with(e, model):
    loaded = Calibration.load(e.path)
    assert loaded == e
    assert torch.equal(loaded.factors(model[0].weight), e.factors(model[0].weight))
    assert loaded.factors(model[0].weight + 1) is None


def test_a_calibration_of_changed_weights_is_in_no_file(e, model):
    assert Calibration.load(e.path, model).path == e.path
    torch.manual_seed(1)
    changed = torch.nn.Sequential(*(torch.nn.Linear(96, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
    loaded = Calibration.load(e.path, changed)
    assert loaded != e
    assert loaded.path is None


def test_a_pickle_keeps_the_path(policy, path):
    pickle.loads(pickle.dumps(policy)).save(path)
    assert path.read_text() == TEXT
