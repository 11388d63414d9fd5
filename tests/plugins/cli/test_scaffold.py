"""``polycast new-backend`` and ``new-plugin``: the files that they write; a refusal leaves none."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from polycast_plugins.cli import app, scaffold


def files_of(package, *others):
    return {"README.md", "pyproject.toml", f"{package}/__init__.py", f"{package}/py.typed", *others}


CONFORMANCE = "tests/test_conformance.py"
FILES = files_of("polycast_acme", "polycast_acme/policies.py", "tests/expected_failures.txt", CONFORMANCE)
MODULES_OF_AN_EXTENSION = (f"acme_odd/{name}.py" for name in ("extension", "kernels", "ops", "recipe"))
OF_AN_EXTENSION = files_of("acme_odd", *MODULES_OF_AN_EXTENSION, CONFORMANCE, "tests/test_extension.py")
OF_A_PLUGIN = files_of("acme_odd", "acme_odd/command.py", "acme_odd/count.py", "tests/test_plugin.py")
EXTEND, PLUGIN = ("new-backend", "--extend", "cpu"), ("new-plugin",)


def new(*arguments, command=("new-backend",)):
    return CliRunner().invoke(app, [*command, *map(str, arguments)])


def written(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_only_the_package(here):
    result = new("acme")
    then = "pip install -e './polycast-acme[test]' && pytest ./polycast-acme"
    assert (result.exit_code, result.stdout) == (0, f"polycast-acme: the backend of acme. Edit it, then: {then}\n")
    assert written(here) == {f"polycast-acme/{name}" for name in FILES}


def test_it_names_the_package_that_has_a_backend_of_the_device(here):
    said = "polycast-cpu: the backend of cpu (cpu has that of polycast; --extend cpu would add to it). "
    assert new("cpu").stdout.startswith(said)


REQUIRED = {"0.1.0": ">=0.1.0,<0.4", "1.12.3": ">=1.12.3,<1.15", "0.2.0.dev1": ">=0.2.0.dev1,<0.5"}


@pytest.mark.parametrize("version", REQUIRED)
def test_it_requires_the_versions_that_keep_what_it_uses(here, monkeypatch, version):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    new("acme")
    assert f'"polycast{REQUIRED[version]}"' in (here / "polycast-acme/pyproject.toml").read_text()
    assert "    api = 1" in (here / "polycast-acme/polycast_acme/__init__.py").read_text()


def test_only_a_device_without_a_name_in_torch_renames_privateuse1(here):
    new("hpu")
    new("acme_npu")
    rename = 'torch.utils.rename_privateuse1_backend("{}")'
    assert "rename" not in (here / "polycast-hpu/polycast_hpu/__init__.py").read_text()
    assert rename.format("acme_npu") in (here / "polycast-acme-npu/polycast_acme_npu/__init__.py").read_text()


def test_ops_missing_from_torchs_list_for_accelerators_are_expected_failures(here):
    new("mps")
    lines = (here / "polycast-mps/tests/expected_failures.txt").read_text().splitlines()
    assert "aten::batch_norm  has no policy in policies.py yet: torch's own kernel runs" in lines


def test_the_name_of_the_distribution_ends_in_a_letter(here):
    """pip refuses a name that ends in an underscore."""
    assert new("acme_").exit_code == 0
    assert 'name = "polycast-acme"\n' in (here / "polycast-acme/pyproject.toml").read_text()


MODULE = "{0!r} cannot be part of a Python module's name. Name the device as torch does: letters, such as npu."


INVALID = {
    **dict.fromkeys(["", "class", "my-npu", "../npu", "npu:0", "_npu", "nπu"], MODULE),
    "NPU": "{0!r} is not in lower case, as device types of torch are. Write npu.",
    "npu2": "torch does not accept {0!r} as a device: Invalid device string: {0!r}. Use letters and und",
    "meta": "torch has no Autocast dispatch key for {0!r}, so it can have no backend.",
}


def test_an_invalid_device_name_is_refused(here, subtests):
    for name, message in INVALID.items():
        with subtests.test(name=name):
            result = new(name)
            assert result.exit_code == 2
            assert result.stderr.startswith(f"polycast: {message.format(name)}")
    result = new("acme-odd", command=("new-backend", "--extend", "cpuu"))
    assert result.exit_code == 2
    assert result.stderr.startswith("polycast: Invalid device string: 'cpuu'. Did you mean 'cpu'?")
    assert list(here.iterdir()) == []


TAKEN = "{!r} names something of polycast or of a plugin already. Choose another name."
MODULES = "{!r} is a Python module already, which the package would hide. Choose another name."
WORDS = "{!r} cannot name a package. Use words in lower case, such as acme-attention."


@pytest.mark.parametrize("command", [EXTEND, PLUGIN], ids=" ".join)
def test_a_package_that_cannot_have_its_name_is_refused(here, subtests, command):
    for message, names in {
        WORDS: ["", "Acme", "9acme", "acme--odd", "../acme", "class", "nπu"],
        TAKEN: ["autocast", "observe", "int8", "quantize", "doctor", "new-plugin", "registry"],
        MODULES: ["torch", "json", "sys", "polycast_plugins", "tests"],
    }.items():
        for name in names:
            with subtests.test(name=name):
                result = new(name, command=command)
                assert (result.exit_code, result.stderr) == (2, f"polycast: {message.format(name)}\n")
    assert list(here.iterdir()) == []


EXISTS = "{} exists here already. Move it away, or write the package in another folder."


@pytest.mark.parametrize(
    ("command", "what", "files"),
    [(EXTEND, "an extension of cpu", OF_AN_EXTENSION), (PLUGIN, "a plugin of polycast", OF_A_PLUGIN)],
)
def test_a_package_has_the_files_of_its_kind_and_is_not_overwritten(here, command, what, files):
    result = new("acme-odd", command=command)
    then = "pip install -e './acme-odd[test]' && pytest ./acme-odd"
    assert (result.exit_code, result.stdout) == (0, f"acme-odd: {what}. Edit it, then: {then}\n")
    assert written(here / "acme-odd") == files
    again = new("acme_odd", command=command)
    assert (again.exit_code, again.stderr) == (2, f"polycast: {EXISTS.format('acme-odd')}\n")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_existing_files_are_not_overwritten(here, kind):
    target = here / "polycast-acme"
    file = target if kind == "file" else target / "mine"
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    result = new("acme")
    assert (result.exit_code, result.stderr) == (2, f"polycast: {EXISTS.format('polycast-acme')}\n")
    assert [path.read_text() for path in here.rglob("*") if path.is_file()] == ["mine"]


def test_a_failure_leaves_no_files(here, monkeypatch):
    def fails(path, to):
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "rename", fails)
    result = new("acme")
    assert (result.exit_code, result.stderr) == (2, "polycast: polycast-acme cannot be written: the disk is full\n")
    assert list(here.iterdir()) == []


def test_every_template_is_used():
    files = {path.name.removesuffix(".template") for path in scaffold.TEMPLATES.rglob("*") if path.is_file()}
    parts = {"entry_points", "naming", "pytest"}
    assert files == {Path(name).name for name in FILES | OF_AN_EXTENSION | OF_A_PLUGIN} | parts
