"""A package of a third party with a public name, a command and a change to torch, from a folder and from its wheel."""

import importlib
import subprocess
import sys

import pytest
import torch

import polycast
from polycast.plugin import Feature
from polycast.policy import manifests

SOURCES = {
    "__init__": """
from polycast.plugin import Plugin

plugin = Plugin(
    names={"count_softplus": "acme_count.softplus:count_softplus"},
    commands={"softplus": "acme_count.command:run"},
)
""",
    "softplus": """
import torch
from polycast.plugin import Feature

calls = []


def _count(patch):
    theirs = torch.nn.functional.softplus

    def softplus(*args, **kwargs):
        calls.append(polycast_is_on())
        return theirs(*args, **kwargs)

    patch.replace(torch.nn.functional, "softplus", softplus)


def polycast_is_on():
    return torch.is_autocast_enabled("cpu")


SOFTPLUS = Feature(
    "acme: softplus",
    "Calls of softplus are not counted.",
    (("torch.nn.functional", ("torch.nn.functional.softplus",), _count),),
)


def count_softplus():
    calls.clear()
    SOFTPLUS.make()
    return calls
""",
    "command": """
import polycast, torch, typer


def run(times: int = 1) -> None:
    '''Count calls of softplus.'''
    calls = polycast.count_softplus()
    with polycast.autocast("cpu"):
        for _ in range(times):
            torch.nn.functional.softplus(torch.ones(2))
    typer.echo(f"softplus ran {calls.count(True)} times in a region")
""",
}
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-count"
version = "2.5"

[project.entry-points."polycast.plugins"]
acme = "acme_count:plugin"
"""
THEIRS = torch.nn.functional.softplus


FILES = {f"acme_count/{name}.py": source for name, source in SOURCES.items()}


def in_a_folder(folder, distribution):
    distribution("acme-count", {"acme": "acme_count:plugin"}, FILES, "2.5", "polycast.plugins")


def from_a_wheel(folder, distribution):
    source = folder.parent / "source"
    for path, text in {**FILES, "pyproject.toml": PYPROJECT}.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder.parent, source], check=True)
    (wheel,) = folder.parent.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "-q", "--target", folder, wheel], check=True)


@pytest.fixture(
    autouse=True, params=[in_a_folder, pytest.param(from_a_wheel, marks=pytest.mark.slow)], ids=lambda by: by.__name__
)
def _installed(request, folder, distribution, monkeypatch):
    request.param(folder, distribution)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    manifests.forget()
    yield
    polycast.uninstall()
    manifests.forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_count"]:
        del sys.modules[name]


def test_its_name_is_polycasts():
    assert polycast.count_softplus.__module__ == "acme_count.softplus"
    assert "count_softplus" in dir(polycast)


def test_its_change_to_torch_is_made_when_it_is_needed_and_undone_by_uninstall():
    assert torch.nn.functional.softplus is THEIRS
    calls = polycast.count_softplus()
    torch.nn.functional.softplus(torch.ones(2))
    assert calls == [False]
    assert [each.name for each in Feature.made()][-1] == "acme: softplus"
    polycast.uninstall()
    assert torch.nn.functional.softplus is THEIRS


def test_its_command_runs_and_is_in_the_help(polycast_command):
    assert polycast_command("softplus", "--times", "2").stdout == "softplus ran 2 times in a region\n"
    assert "softplus     Count calls of softplus." in polycast_command("--help").stdout


def test_doctor_says_what_it_adds_and_changes(polycast_command):
    polycast.count_softplus()
    shown = polycast_command("doctor").stdout
    assert "\n  acme of acme-count 2.5: ready\n" in shown
    assert "\n  acme: softplus: made\n" in shown
