"""Private names of torch: read in one module, and regions run without each."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polycast
from polycast.engine import installation
from polycast.torch_internals import names

CORE = Path(polycast.__file__).parent
LACKING = Path(__file__).with_name("lacking.py")
MAY_READ = {
    "compilers/backward.py": "the configuration of what wrap_joint has found",
    "compilers/casts_in_graphs.py": "what Dynamo offers to the code that it traces, where it is at work",
    "compilers/guards.py": "what guard_dynamo has tried",
    "compilers/torchscript.py": "what torch.jit.script asks for, where it is at work",
    "policy/recipes.py": "Dynamo's graph_break, where it is at work",
}
"""The modules that read private names themselves, and which; besides those that change torch, by the table."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked for each name")
@pytest.mark.parametrize("chosen", ["native", "reference"])
def test_regions_run_without_each_name_and_one_warning_says_what_is_lost(chosen):
    environment = {**os.environ, "POLYCAST_ENGINE": chosen}
    ran = subprocess.run([sys.executable, LACKING], capture_output=True, text=True, env=environment, check=True)
    answers = json.loads(ran.stdout)
    assert sorted(answers) == sorted(names.READ)
    assert {name: answer["error"] for name, answer in answers.items() if answer["error"]} == {}
    lacks = "lacks internals that polycast reads (without {}: {})"
    untold = {
        name: answer["warnings"]
        for name, answer in answers.items()
        if [lacks.format(name, names.READ[name]) in said for said in answer["warnings"]] != [True]
    }
    assert untold == {}


def test_what_is_missing_is_told_once_in_a_process_when_the_first_engine_is_chosen(monkeypatch):
    monkeypatch.setattr(names, "missing", {"torch._a": "this is lost", "torch._b": "and that"})
    monkeypatch.setattr(names, "_warned", False)
    text = r"This torch .* lacks .* \(without torch._a: this is lost; without torch._b: and that\). Regions work."
    installation.forget_choice()
    with pytest.warns(UserWarning, match=text) as said, polycast.autocast("cpu"):
        pass
    installation.forget_choice()
    with polycast.autocast("cpu"):
        pass
    assert [warning.filename for warning in said] == [__file__]


def test_this_torch_lacks_nothing():
    assert names.missing == {}


@pytest.mark.parametrize("name", names.READ)
def test_a_name_is_private_and_its_loss_is_told_in_words(name):
    assert any(part.startswith("_") for part in name.split("."))
    assert len(names.READ[name].split()) > 2


def private_names(path):
    """Return the private names of torch that a module has in its code, and where."""
    found = []

    def dotted(node):
        if isinstance(node, ast.Name):
            return node.id
        before = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return before and f"{before}.{node.attr}"

    tree = ast.parse(path.read_text(encoding="utf-8"))
    changes_torch = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(_is_patch(argument) for argument in node.args.args)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in changes_torch:
            continue
        if isinstance(node, ast.Attribute):
            name = dotted(node) or ""
        elif isinstance(node, ast.ImportFrom):
            name = ".".join([node.module or "", *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Import):
            name = node.names[0].name
        else:
            continue
        first, *others = name.split(".")
        if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in others):
            found.append(f"{name}:{node.lineno}")
    return found


def _is_patch(argument):
    return isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Patch"


ROOMS = ("policy", "plugins", "engine", "compilers", "out_dtype", "region", "drop_in")


@pytest.mark.parametrize(
    "path",
    [path for room in ROOMS for path in (CORE / room).rglob("*.py")],
    ids=lambda path: str(path.relative_to(CORE)),
)
def test_no_other_module_names_what_is_private_in_torch(path):
    if str(path.relative_to(CORE)) not in MAY_READ:
        assert private_names(path) == []


@pytest.mark.parametrize("path", MAY_READ)
def test_what_may_read_private_names_does(path):
    assert private_names(CORE / path) != []


def test_what_stands_in_finds_the_ops_that_torch_finds():
    for name, overload, there in (("aten::mm", "", True), ("aten::norm", "Scalar", True), ("aten::norm", "x", False)):
        found = True
        try:
            names._schema_by_packet(name, overload)
        except RuntimeError:
            found = False
        assert found is there, (name, overload)


def test_what_stands_in_switches_autocast_off_and_on_again():
    torch.set_autocast_enabled("cpu", True)
    try:
        with names._switched_off(("cpu", "cuda")):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cpu", False)
