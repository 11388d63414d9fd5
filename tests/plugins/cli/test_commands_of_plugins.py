"""Names, commands and changes to torch of plugins, their sections of ``polycast doctor``, and their remarks."""

import json
import sys

import pytest
import torch

import polycast
from polycast.plugin import Feature
from polycast_plugins.cli import main

GREET = """
import typer
def greet(name: str, loudly: bool = False) -> None:
    \"\"\"Greet somebody.\"\"\"
    typer.echo(f"hello {name}{'!' * loudly}")
"""
COMMANDS = "commands={'greet': '%s:greet'}"


def test_a_command_of_a_plugin_is_in_the_help_and_runs_and_is_corrected(polycast_command, offer):
    offer("acme", COMMANDS % "acme_code", GREET)
    assert "greet        Greet somebody." in polycast_command("--help").stdout
    assert polycast_command("greet", "you", "--loudly").stdout == "hello you!\n"
    assert "Did you mean 'greet'" in polycast_command("grete").stderr


def test_a_command_imports_no_other_plugin(polycast_command, offer):
    offer("acme", COMMANDS % "acme_code", GREET)
    offer("other", "commands={'part': 'other_code:part'}, doctor={'other': 'other_code:lines'}")
    polycast_command("greet", "you")
    assert "acme_code" in sys.modules
    assert "other_code" not in sys.modules


def test_an_app_is_a_group_of_commands(polycast_command, offer):
    code = GREET + "app = typer.Typer(add_completion=False)\napp.command()(greet)\napp.command('part')(lambda: None)\n"
    offer("acme", "commands={'acme': 'acme_code:app'}", code)
    assert polycast_command("acme", "greet", "you").stdout == "hello you\n"
    assert polycast_command("acme", "part").exit_code == 0


@pytest.mark.parametrize("code", ["import no_such_module", "raise SystemExit(0)", "raise OSError('no licence')"])
def test_a_command_that_cannot_be_imported_breaks_itself_only(polycast_command, offer, code):
    offer("acme", COMMANDS % "acme_code", code)
    done = polycast_command("greet", "you", "--loudly")
    assert done.stderr.startswith("polycast: acme_code:greet cannot be imported. The plugin 'acme' of acme is broken: ")
    assert (done.stdout, done.exit_code) == ("", 2)
    shown = polycast_command("--help").stdout
    assert "greet        acme_code:greet cannot be imported." in shown
    assert "devices      List the backend" in shown
    assert polycast_command("ops", "cpu").exit_code == 0


def test_a_broken_manifest_breaks_no_command(polycast_command, offer):
    offer("acme", "commands=None")
    with pytest.warns(UserWarning, match="The plugin 'acme' of acme is broken: TypeError: commands must map names"):
        assert polycast_command("ops", "cpu").exit_code == 0


def test_two_plugins_with_one_command_are_a_conflict_that_names_both(polycast_command, offer):
    offer("acme", COMMANDS % "acme_code", GREET)
    offer("other", COMMANDS % "other_code", GREET)
    done = polycast_command("greet", "you")
    said = "Several plugins have 'greet' in commands: acme (acme), other (other). Uninstall all but one."
    assert (done.stderr, done.exit_code) == (f"polycast: {said}\n", 2)
    assert "greet        Several plugins have 'greet'" in polycast_command("--help").stdout


def test_a_function_that_a_command_returns_is_called_when_the_command_line_has_ended(offer, monkeypatch):
    code = "import sys\ndef then():\n    return lambda: sys.exit(sys.excepthook is sys.__excepthook__)\n"
    offer("acme", "commands={'then': 'acme_code:then'}", code)
    monkeypatch.setattr(sys, "argv", ["polycast", "then"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit, match="True"):
        main()


SECTION = """
def licence():
    yield "until 2030"
def fault():
    raise OSError("none")
"""


def test_doctor_has_the_sections_of_plugins_or_their_errors(polycast_command, offer):
    offer("acme", "doctor={'licence': 'acme_code:licence', 'fault': 'acme_code:fault'}", SECTION)
    assert "\nlicence:\n  until 2030\nfault:\n  OSError: none\n" in polycast_command("doctor").stdout
    found = json.loads(polycast_command("doctor", "--json").stdout)
    assert found["licence"] == ["until 2030"]


def test_doctor_lists_the_plugins_and_what_they_add_or_why_one_is_broken(polycast_command, offer):
    offer("acme", COMMANDS % "acme_code", GREET)
    found = json.loads(polycast_command("doctor", "--json").stdout)
    assert {each["name"]: each["adds"] for each in found["plugins"]}["acme"] == {"commands": ["greet"]}
    offer("other", "names=1")
    with pytest.warns(UserWarning, match="'other'"):
        shown = polycast_command("doctor").stdout
    assert "\n  acme of acme 1.5: ready\n" in shown
    assert "\n  other of other 1.5: The plugin 'other' of other is broken: TypeError: names must map names" in shown


COUNT = """
import torch
from polycast.plugin import Feature

calls = []
theirs = torch.nn.functional.softplus

def softplus(*args):
    calls.append(torch.is_autocast_enabled("cpu"))
    return theirs(*args)

def change(patch):
    patch.replace(torch.nn.functional, "softplus", softplus)

def count_softplus():
    row = "torch.nn.functional", ("torch.nn.functional.softplus",), change
    Feature("acme: softplus", "Calls of softplus are not counted.", (row,)).make()
    return calls
"""


def test_a_change_to_torch_by_a_name_of_a_plugin_is_undone_by_uninstall(polycast_command, offer):
    theirs = torch.nn.functional.softplus
    offer("acme", "names={'count_softplus': 'acme_code:count_softplus'}", COUNT)
    assert "count_softplus" in dir(polycast)
    calls = polycast.count_softplus()
    assert [each.name for each in Feature.made()][-1] == "acme: softplus"
    torch.nn.functional.softplus(torch.ones(2))
    with polycast.autocast("cpu"):
        torch.nn.functional.softplus(torch.ones(2))
    assert calls == [False, True]
    assert "\n  acme: softplus: made\n" in polycast_command("doctor").stdout
    polycast.uninstall()
    assert torch.nn.functional.softplus is theirs


def test_devices_has_the_remarks_of_plugins(polycast_command, offer):
    code = "def price(device):\n    return f'{device} costs nothing'\ndef fail(device):\n    1 / 0\n"
    offer("acme", "devices={'price': 'acme_code:price', 'fault': 'acme_code:fail'}", code)
    shown = polycast_command("devices").stdout
    assert "\ncpu: cpu costs nothing\n" in shown
    assert "\ncpu: acme_code:fail raised ZeroDivisionError: division by zero\n" in shown
    found = {each["device_type"]: each for each in json.loads(polycast_command("devices", "--json").stdout)}
    assert (found["cpu"]["price"], found["hpu"]["price"]) == ("cpu costs nothing", None)
