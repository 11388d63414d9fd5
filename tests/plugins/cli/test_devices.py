"""`polycast devices`: the state of each device and its backend, as a table and as JSON."""

import importlib.metadata
import json
import re

import pytest
import torch

import polycast
from polycast.engine import installation
from polycast.toolchain import cache_folder, load
from polycast.toolchain.prebuilt import no_compiler
from polycast_plugins.fastest import profile


def listed(result):
    """Return the devices of ``devices --json`` by their types."""
    return {device["device_type"]: device for device in json.loads(result.stdout)}


def test_every_backend_is_listed_with_its_state(polycast_command):
    result = polycast_command("devices", "--all")
    assert result.exit_code == 0
    rows = {words[0]: words for line in result.stdout.splitlines() if (words := line.split())}
    assert rows["device"] == ["device", "state", "default", "supported", "from"]
    for name, status in polycast.backends().items():
        assert rows[name][1] == status.state
        assert rows[name][2] == ("-" if status.default_dtype is None else str(status.default_dtype)[len("torch.") :])


def test_a_device_that_is_not_ready_has_a_reason(polycast_command, hand_made):
    hand_made("ipu", availability=lambda: polycast.plugin.Availability(False, "the box [red] is not plugged in"))
    assert "ipu: the box [red] is not plugged in\n" in polycast_command("devices").stdout


def test_a_device_without_a_backend_shows_what_is_needed(polycast_command):
    reason = "A plugin is needed: no distribution has an entry point 'xla' in the group 'polycast.backends'."
    missing = [name for name, status in polycast.backends().items() if status.state == "missing"]
    of_that_name = reason.replace("entry point 'xla'", "entry point of that name")
    every, said = polycast_command("devices", "--all").stdout, polycast_command("devices").stdout
    assert f"{', '.join(missing)}: {of_that_name}\n" in every
    assert re.search(r"^xla ", every, re.M)
    assert [name for name in missing if name in said] == []
    assert "\nOther devices need a plugin: polycast devices --all\n" in said
    device = listed(polycast_command("devices", "--json"))["xla"]
    assert (device["state"], device["reason"], device["supported_dtypes"]) == ("missing", reason, None)


def line_that_begins_with(word, text):
    (line,) = (line for line in text.splitlines() if line.startswith(word))
    return line


def test_devices_names_the_engine_and_its_origin(polycast_command, engine):
    last = line_that_begins_with("Engine:", polycast_command("devices").stdout)
    if engine == "reference":
        assert last == "Engine: reference, because POLYCAST_ENGINE=reference. Unset it for the native engine."
    else:
        origin = r"(compiled here|came with polycast): /.*/polycast_native\.(so|tar\.xz)"
        assert re.fullmatch(rf"Engine: native, {origin}", last)


def test_devices_shows_the_cost_of_the_reference_engine_and_the_remedy(polycast_command, monkeypatch):
    failure = no_compiler()
    monkeypatch.setenv("POLYCAST_ENGINE", "auto")
    monkeypatch.setattr(load, "try_build", lambda _: failure)
    installation.forget_choice()
    result = polycast_command("devices")
    installation.forget_choice()
    version = torch.__version__.partition("+")[0]
    assert (
        f"Engine: reference, because the native engine cannot be built: {failure}\n"
        "Without the native engine, regions are slower, weights are not cached and polycast.observe does not work; "
        "without a compiler, neither do kernels in C++, such as those of int8. "
        f"A wheel of polycast that has an engine for torch {version} needs no compiler.\n"
    ) in result.stdout
    assert "apt install g++" in str(failure)
    assert result.stderr == ""  # no warning of the same


@pytest.mark.parametrize("columns", ["60", "80"])
def test_devices_does_not_break_words(polycast_command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    said = re.sub("\x1b\\[[0-9;]*m", "", polycast_command("devices", "--all").stdout)
    words = set(said.split())
    for name, status in polycast.backends().items():
        assert {name, status.state} <= words or f"{name}," in words
        assert set(status.reason.replace(f"point {name!r}", "point of that name").split()) <= words
    assert {"device", "state", "default", "supported", "from"} <= words
    assert all(len(line) <= int(columns) or " " not in line for line in said.splitlines())  # or a long path


def test_the_origin_of_the_ops_of_backends_is_shown(polycast_command, hand_made):
    hand_made("cpu", ops_in_cpp=["polycast_plugins.quantize.cpu.native", "acme_npu.native"])
    shown = polycast_command("devices").stdout
    missing = line_that_begins_with("Ops of acme_npu", shown)
    assert missing.startswith("Ops of acme_npu.native: none: there is no package acme_npu.native")
    ours = line_that_begins_with("Ops of polycast_plugins.quantize", shown)
    origins = "compiled here[:,] |came with polycast: |not compiled yet; `polycast build` does it$|none: "
    assert re.search(f": ({origins})", ours)


def test_devices_json_has_the_same_keys_for_every_device(polycast_command):
    devices = json.loads(polycast_command("devices", "--json").stdout)
    assert [device["device_type"] for device in devices] == list(polycast.backends())
    assert len({tuple(device) for device in devices}) == 1


def described(**values):
    """Return what JSON has of a device, with these values."""
    nothing = dict.fromkeys(["default_dtype", "supported_dtypes", "distribution", "version", "profile"])
    engine = polycast.plugin.choose_engine().name
    return {**nothing, "replaces": [], "extensions": [], "polycast": polycast.__version__, "engine": engine, **values}


def test_devices_json_of_a_ready_device(polycast_command, monkeypatch, tmp_path):
    monkeypatch.setattr(cache_folder, "cache_directory", lambda: tmp_path)  # has no profile of an earlier test
    profile.forget()
    version = importlib.metadata.version("polycast")
    assert listed(polycast_command("devices", "--json"))["cpu"] == described(
        device_type="cpu",
        state="ready",
        reason="",
        default_dtype="bfloat16",
        supported_dtypes=["bfloat16", "float16"],
        distribution="polycast",
        version=version,
        extensions=[f"polycast {version} (polycast_plugins.quantize.cpu)"],
    )


def test_devices_lists_a_broken_plugin_among_the_others(polycast_command, plugin):
    plugin("acme_broken", "raise OSError('libacme.so: cannot open')")
    devices = listed(polycast_command("devices", "--json"))
    assert devices["cpu"]["state"] == "ready"
    reason = (
        "The backend for 'ipu' is broken: acme_broken 1.5 (acme_broken) could not be loaded: OSError: libacme.so: "
        "cannot open\nRepair or uninstall acme_broken, or set POLYCAST_BLOCK=ipu."
    )
    assert devices["ipu"] == described(
        device_type="ipu", state="broken", reason=reason, distribution="acme_broken", version="1.5"
    )
    result = polycast_command("devices", "--json", "--all")
    assert listed(result)["ipu"] == devices["ipu"]
    assert "OSError: libacme.so: cannot open" in result.stderr


def test_all_shows_the_traceback_of_a_broken_plugin(polycast_command, plugin):
    plugin("acme_traced", "raise OSError('libacme.so: cannot open')")
    shown = polycast_command("devices").stdout
    assert "Traceback" not in shown
    assert shown.endswith("polycast devices --all shows the tracebacks.\n")
    shown = polycast_command("devices", "--all").stdout
    assert "The plugin of 'ipu' raised:\nTraceback (most recent call last):\n" in shown
    assert 'acme_traced.py", line 1, in <module>' in shown
    assert "OSError: libacme.so: cannot open\n" in shown


def test_all_shows_which_recipes_a_device_supports(polycast_command, hand_made):
    def recipe_availability(recipe):
        reason = "" if recipe.kind == "int8" else "it has no such units"
        return polycast.plugin.Availability(not reason, reason)

    hand_made("cpu", recipe_availability=recipe_availability)
    shown = polycast_command("devices", "--all").stdout
    assert "cpu: int8: yes\ncpu: int4: no, it has no such units\ncpu: float8: no, it has no such units\n" in shown
    assert "xpu: int8" not in shown
    assert "int8" not in polycast_command("devices").stdout


def test_a_warning_of_a_plugin_that_a_filter_makes_an_error_is_a_remark(polycast_command, hand_made):
    def warn(*_):
        raise UserWarning("the driver is old")

    hand_made("hpu", availability=warn)
    hand_made("cpu", device_details=warn, recipe_availability=warn)
    said = polycast_command("devices", "--all").stdout
    assert "hpu: the driver is old\n" in said
    assert "cpu: device_details() raised UserWarning: the driver is old\n" in said
    assert "cpu: recipe_availability() raised UserWarning: the driver is old\n" in said


@pytest.mark.parametrize("error", [KeyError("driver"), SystemExit("driver")], ids=["error", "exit"])
def test_a_plugin_whose_supported_dtypes_raise_is_listed(polycast_command, hand_made, error):
    def fail():
        raise error

    hand_made("ipu", supported_dtypes=fail)
    assert listed(polycast_command("devices", "--json"))["ipu"]["supported_dtypes"] is None
    said = f"\nipu: supported_dtypes() raised {type(error).__name__}: {error}\n"
    assert said in polycast_command("devices").stdout


def test_devices_shows_a_conflict(polycast_command, plugin):
    plugin("acme_one", "")
    plugin("acme_two", "")
    device = listed(polycast_command("devices", "--json"))["ipu"]
    assert (device["state"], device["supported_dtypes"]) == ("conflict", None)


def test_blocked_backends_are_shown(polycast_command, monkeypatch, rediscover):
    monkeypatch.setenv("POLYCAST_BLOCK", "cpu")
    result = polycast_command("devices")
    assert "cpu: The backend for 'cpu' is blocked by POLYCAST_BLOCK." in result.stdout
    assert result.exit_code == 0


def test_a_backend_shows_which_one_it_replaces(polycast_command, plugin, monkeypatch):
    monkeypatch.setenv("POLYCAST_PROVIDER", "ipu=acme-chosen")
    plugin("acme_chosen", "")
    plugin("acme_other", "")
    assert "ipu: in place of acme_other 1.5 (acme_other)\n" in polycast_command("devices").stdout
