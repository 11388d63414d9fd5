"""The command line: what it prints, for people and for programs, and how it fails."""

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import polycast
from polycast.cli import app
from polycast.engine.installation import torch_ops
from polycast.plugins.registry import registry

KEYS = ["device_type", "state", "reason", "default_dtype", "supported_dtypes", "distribution", "version", "replaces"]

WORKING = """
import polycast, torch

class Acme(polycast.Backend):
    device_type = "ipu"
    default_dtype = torch.float16
    policies = polycast.STANDARD_POLICIES

    def supported_dtypes(self):
        {supported}

    def availability(self):
        return polycast.Availability(False, "the box [red] is not plugged in")

@polycast.hookimpl
def polycast_backend():
    return Acme()
"""


@pytest.fixture
def polycast_command(monkeypatch):
    """Return a function that runs the command line in this process and returns its result."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        return CliRunner().invoke(app, arguments)

    return call


@pytest.fixture
def rediscover(monkeypatch):
    """Have the backends be looked for anew, in the environment of the test."""
    monkeypatch.setattr(registry, "_discovered", None)
    monkeypatch.setattr(registry, "ready", {})


@pytest.fixture
def plugin(monkeypatch, tmp_path, rediscover):
    """Return a function that installs a distribution with a plugin for ``ipu``; `name` is that of both."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        metadata = tmp_path / f"{name}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (metadata / "entry_points.txt").write_text(f"[polycast.backends]\nipu = {name}\n")

    return install


def listed(result):
    """Return the devices of ``devices --json`` by their types."""
    return {device["device_type"]: device for device in json.loads(result.stdout)}


def test_version(polycast_command):
    result = polycast_command("--version")
    assert result.stdout == f"polycast {importlib.metadata.version('polycast')}\n"
    assert result.exit_code == 0


def test_help_names_every_command(polycast_command):
    words = polycast_command("--help").stdout.split()
    assert {"devices", "ops", "build", "demo", "doctor", "run"} <= set(words)


def test_module_runs_as_a_command():
    command = [sys.executable, "-m", "polycast", "ops", "cpu", "--policy", "promote", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {entry["policy"] for entry in json.loads(result.stdout)} == {"promote"}


def test_module_reports_an_error_without_a_traceback():
    command = [sys.executable, "-m", "polycast", "ops", "not a real device"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr == "polycast: Invalid device string: 'not a real device'\n"
    assert result.stdout == ""
    assert result.returncode == 2


def test_importing_polycast_does_not_import_what_only_the_command_line_needs():
    code = "import polycast, sys; print(sorted({'rich', 'typer', 'sklearn', 'polycast.cli'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_devices_lists_every_backend_with_its_state(polycast_command):
    result = polycast_command("devices")
    assert result.exit_code == 0
    rows = {words[0]: words for line in result.stdout.splitlines() if (words := line.split())}
    for name, status in polycast.backends().items():
        assert rows[name][1] == status.state
        assert rows[name][2] == ("-" if status.default_dtype is None else str(status.default_dtype)[len("torch.") :])


def test_devices_says_why_a_device_is_not_ready(polycast_command, plugin):
    plugin("acme_absent", WORKING.format(supported="return (torch.float16,)"))
    assert "ipu: the box [red] is not plugged in\n" in polycast_command("devices").stdout


def test_devices_says_of_a_device_without_a_backend_what_is_needed(polycast_command):
    reason = "A plugin is needed: no distribution has an entry point 'xla' in the group 'polycast.backends'."
    assert f"xla: {reason}\n" in polycast_command("devices").stdout
    device = listed(polycast_command("devices", "--json"))["xla"]
    assert (device["state"], device["reason"], device["supported_dtypes"]) == ("missing", reason, None)


def line_that_begins_with(word, text):
    (line,) = (line for line in text.splitlines() if line.startswith(word))
    return line


def test_devices_names_the_engine(polycast_command, engine):
    last = line_that_begins_with("Engine:", polycast_command("devices").stdout)
    assert last.startswith(f"Engine: {engine}")
    assert (engine == "reference") == (last == "Engine: reference")


def test_devices_says_where_the_native_engine_came_from(polycast_command, engine):
    last = line_that_begins_with("Engine:", polycast_command("devices").stdout)
    if engine == "native":
        assert re.fullmatch(r"Engine: native, (compiled here|came with polycast): /.*/polycast_native\.so", last)


def test_devices_says_where_the_ops_of_backends_come_from(polycast_command, hand_made):
    hand_made("cpu", ops_in_cpp=["polycast_cpu.native", "acme_npu.native"])
    missing = line_that_begins_with("Ops of acme_npu", polycast_command("devices").stdout)
    assert missing.startswith("Ops of acme_npu.native: none: there is no package acme_npu.native")
    ours = line_that_begins_with("Ops of polycast_cpu", polycast_command("devices").stdout)
    assert re.search(
        r": (compiled here: |came with polycast: |not compiled yet, as `polycast build` does$|none: )", ours
    )


def test_devices_json_has_the_same_keys_for_every_device(polycast_command):
    devices = json.loads(polycast_command("devices", "--json").stdout)
    assert [device["device_type"] for device in devices] == list(polycast.backends())
    assert all(list(device) == KEYS for device in devices)


def test_devices_json_of_a_ready_device(polycast_command):
    assert listed(polycast_command("devices", "--json"))["cpu"] == {
        "device_type": "cpu",
        "state": "ready",
        "reason": "",
        "default_dtype": "bfloat16",
        "supported_dtypes": ["bfloat16", "float16"],
        "distribution": "polycast",
        "version": importlib.metadata.version("polycast"),
        "replaces": [],
    }


def test_devices_lists_a_broken_plugin_among_the_others(polycast_command, plugin):
    plugin("acme_broken", "raise OSError('libacme.so: cannot open')")
    devices = listed(polycast_command("devices", "--json"))
    assert devices["cpu"]["state"] == "ready"
    assert devices["ipu"] == {
        "device_type": "ipu",
        "state": "broken",
        "reason": "The backend for 'ipu' is broken: acme_broken 1.5 (acme_broken) could not be loaded: OSError: "
        "libacme.so: cannot open. Repair or uninstall acme_broken, or set POLYCAST_BLOCK=ipu.",
        "default_dtype": None,
        "supported_dtypes": None,
        "distribution": "acme_broken",
        "version": "1.5",
        "replaces": [],
    }


def test_devices_verbose_says_of_each_recipe_whether_the_device_can(polycast_command, hand_made):
    def recipe_availability(recipe):
        return polycast.Availability(recipe.kind == "int8", "" if recipe.kind == "int8" else "it has no such units")

    hand_made("cpu", recipe_availability=recipe_availability)
    shown = polycast_command("devices", "--verbose").stdout
    assert "cpu: int8: yes\ncpu: float8: no, it has no such units\n" in shown
    assert "xpu: int8" not in shown
    assert "int8" not in polycast_command("devices").stdout


def test_devices_verbose_shows_the_traceback_of_a_broken_plugin(polycast_command, plugin):
    plugin("acme_traced", "raise OSError('libacme.so: cannot open')")
    shown = polycast_command("devices", "--verbose").stdout
    assert "The plugin of 'ipu' raised:\nTraceback (most recent call last):\n" in shown
    assert 'acme_traced.py", line 1, in <module>' in shown
    assert "OSError: libacme.so: cannot open\n" in shown


def test_devices_says_how_to_see_the_traceback(polycast_command, plugin):
    plugin("acme_hinted", "raise OSError('libacme.so: cannot open')")
    shown = polycast_command("devices").stdout
    assert "Traceback" not in shown
    assert shown.endswith("polycast devices --verbose shows the traceback of what is broken.\n")


def test_devices_verbose_leaves_json_alone(polycast_command, plugin):
    plugin("acme_json", "raise OSError('libacme.so: cannot open')")
    result = polycast_command("devices", "--json", "--verbose")
    assert listed(result)["ipu"]["state"] == "broken"
    assert "OSError: libacme.so: cannot open" in result.stderr


def test_devices_copes_with_a_plugin_that_cannot_tell_its_dtypes(polycast_command, plugin):
    plugin("acme_silent", WORKING.format(supported="raise KeyError('driver')"))
    assert listed(polycast_command("devices", "--json"))["ipu"]["supported_dtypes"] is None
    assert "ipu: supported_dtypes() raised KeyError: 'driver'\n" in polycast_command("devices").stdout


def test_devices_shows_a_conflict(polycast_command, plugin):
    plugin("acme_one", "")
    plugin("acme_two", "")
    result = polycast_command("devices", "--json")
    assert listed(result)["ipu"]["state"] == "conflict"
    assert listed(result)["ipu"]["supported_dtypes"] is None


def test_devices_shows_what_is_blocked(polycast_command, monkeypatch, rediscover):
    monkeypatch.setenv("POLYCAST_BLOCK", "cpu")
    result = polycast_command("devices")
    assert "cpu: The backend for 'cpu' is blocked by POLYCAST_BLOCK." in result.stdout
    assert result.exit_code == 0


def test_devices_says_what_a_backend_stands_in_for(polycast_command, plugin, monkeypatch):
    monkeypatch.setenv("POLYCAST_PROVIDER", "ipu=acme-chosen")
    plugin("acme_chosen", WORKING.format(supported="return (torch.float16,)"))
    plugin("acme_other", "")
    assert "ipu: in place of acme_other 1.5 (acme_other)\n" in polycast_command("devices").stdout


def test_ops_json_is_the_policy_table(polycast_command):
    shown = json.loads(polycast_command("ops", "cuda", "--json").stdout)
    table = {name: policy.value for name, policy in polycast.get_backend("cuda").policies.items()}
    assert {entry["op"]: entry["policy"] for entry in shown} == table


def test_ops_are_grouped_by_policy_and_sorted_in_it(polycast_command):
    shown = [tuple(entry.values()) for entry in json.loads(polycast_command("ops", "cpu", "--json").stdout)]
    order = [policy.value for policy in polycast.CastPolicy]
    assert shown == sorted(shown, key=lambda entry: (order.index(entry[1]), entry[0]))


def test_ops_prints_a_line_for_each_op_and_counts_them(polycast_command, hand_made):
    fp32, promote = polycast.CastPolicy.FP32, polycast.CastPolicy.PROMOTE
    hand_made("hpu", policies={"aten::log": fp32, "aten::cat": promote, "aten::exp": fp32})
    lines = polycast_command("ops", "hpu").stdout.splitlines()
    assert [line.split() for line in lines if "aten::" in line] == [
        ["aten::exp", "fp32"],
        ["aten::log", "fp32"],
        ["aten::cat", "promote"],
    ]
    assert lines[-1] == "hpu: 3 ops (2 fp32, 1 promote)"


@pytest.mark.parametrize("policy", ["promote", "PROMOTE"])
def test_ops_of_one_policy(polycast_command, policy):
    shown = json.loads(polycast_command("ops", "cpu", "--policy", policy, "--json").stdout)
    assert [entry["op"] for entry in shown] == ["aten::cat", "aten::index_copy", "aten::stack"]


def test_ops_of_a_policy_that_no_op_has(polycast_command):
    assert polycast_command("ops", "cpu", "--policy", "banned").stdout == "cpu: 0 ops\n"


def test_ops_of_a_device_without_a_backend(polycast_command):
    result = polycast_command("ops", "ipu")
    assert result.stderr.startswith("polycast: No polycast backend is installed for 'ipu'. Backends are installed for:")
    assert result.exit_code == 2


def test_ops_of_a_broken_backend(polycast_command, plugin):
    plugin("acme_wreck", "raise OSError('libacme.so: cannot open')")
    result = polycast_command("ops", "ipu")
    assert result.stderr.startswith("polycast: The backend for 'ipu' is broken: acme_wreck 1.5 (acme_wreck) could")
    assert result.stdout == ""
    assert result.exit_code == 2


@pytest.mark.parametrize("command", [["devices"], ["ops", "cpu"], ["demo"]], ids=lambda words: words[0])
@pytest.mark.parametrize("variable", ["POLYCAST_DISCOVERY", "POLYCAST_BLOCK", "POLYCAST_PROVIDER", "POLYCAST_ENGINE"])
def test_variable_with_an_illegal_value(polycast_command, monkeypatch, rediscover, command, variable):
    monkeypatch.setenv(variable, "perhaps,")
    result = polycast_command(*command)
    assert result.stderr.startswith(f"polycast: {variable}='perhaps,' is not legal: expected ")
    assert result.exit_code == 2


def test_no_drift(polycast_command, hand_made):
    ops = torch_ops("cpu")
    hand_made("cpu", policies=dict.fromkeys(ops, polycast.CastPolicy.PASSTHROUGH))
    result = polycast_command("ops", "cpu", "--drift")
    assert result.stdout == f"cpu: no drift. The table and torch {torch.__version__} have the same {len(ops)} ops.\n"
    assert result.exit_code == 0


def test_no_drift_where_an_op_is_left_to_torch_on_purpose(polycast_command, hand_made):
    table = dict.fromkeys(torch_ops("cpu") - {"aten::mm"}, polycast.CastPolicy.PASSTHROUGH)
    hand_made("cpu", policies=table, left_to_torch={"aten::mm": "the driver does it", "aten::of_another": "so it is"})
    first, *left = polycast_command("ops", "cpu", "--drift").stdout.splitlines()
    assert first == f"cpu: no drift. The table and torch {torch.__version__} have the same {len(table)} ops."
    assert left == ["cpu: aten::mm is left to torch's own kernel on purpose: the driver does it"]


@pytest.fixture
def drifted(hand_made):
    """A backend of cpu that lacks an op that torch treats, has one that torch leaves alone, and one that is no op."""
    table = dict.fromkeys(torch_ops("cpu") - {"aten::mm"}, polycast.CastPolicy.PASSTHROUGH)
    table |= {"aten::relu": polycast.CastPolicy.FP32, "acme::gone": polycast.CastPolicy.PROMOTE}
    del table["aten::bmm"]
    return hand_made("cpu", policies=table, left_to_torch={"aten::bmm": "the driver does it"})


def test_drift_says_what_becomes_of_each_op(polycast_command, drifted):
    result = polycast_command("ops", "cpu", "--drift")
    lines = result.stdout.splitlines()
    assert [" ".join(line.split()) for line in lines if "::" in line] == [
        "aten::mm - only torch treats it: torch's own kernel serves it",
        "aten::relu fp32 only the table has it: torch leaves the op alone",
        "acme::gone promote this torch has no such op: skipped",
        "cpu: aten::bmm is left to torch's own kernel on purpose: the driver does it",
    ]
    assert lines[-2] == (
        f"cpu: the table differs from torch {torch.__version__}: 1 ops only in torch, 1 only in the table, 1 skipped."
    )
    assert result.exit_code == 0


def test_drift_json(polycast_command, drifted):
    assert json.loads(polycast_command("ops", "cpu", "--drift", "--json").stdout) == {
        "device_type": "cpu",
        "torch": torch.__version__,
        "only_in_torch": ["aten::mm"],
        "only_in_table": ["aten::relu"],
        "skipped": ["acme::gone"],
        "left_to_torch": {"aten::bmm": "the driver does it"},
    }


def test_drift_is_the_same_with_the_kernels_in_place(polycast_command, drifted):
    before = polycast_command("ops", "cpu", "--drift", "--json").stdout
    polycast.install("cpu")
    assert polycast_command("ops", "cpu", "--drift", "--json").stdout == before


def test_drift_of_one_policy_is_refused(polycast_command):
    result = polycast_command("ops", "cpu", "--drift", "--policy", "fp32")
    assert "--policy and --drift do not go together" in result.stderr
    assert result.exit_code == 2
