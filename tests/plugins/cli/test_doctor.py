"""`polycast doctor`: what it says of a machine that works, and of one that does not."""

import functools
import json
import os
import platform
import warnings

import pytest
import torch
from typer.testing import CliRunner

import polycast
from polycast.engine import installation
from polycast.registry.registry import registry
from polycast.toolchain import load
from polycast.toolchain.prebuilt import no_compiler
from polycast_plugins.cli import app
from polycast_plugins.cli import doctor as examining

SECTIONS = (
    "versions, compiler, engine, cpu, accelerator, environment, plugins, backends, ops, profiles, checks, "
    "changes to torch"
)


def doctor(*options):
    return CliRunner().invoke(app, ["doctor", *options])


def examine():
    """Run the command in this process, and return its status and what it found."""
    result = doctor("--json")
    return result.exit_code, json.loads(result.stdout)


def problems(found):
    return {check["name"]: check["problem"] for check in found["checks"] if check["problem"] is not None}


def test_a_working_machine_has_no_problems_and_every_section(engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, found = examine()
    assert (status, problems(found), ", ".join(found)) == (0, {}, SECTIONS)
    assert found["checks"][0]["name"] == "a region on cpu works"
    assert found["versions"]["python"] == platform.python_version()
    assert {device["device_type"] for device in found["backends"]} == set(polycast.backends())
    shown = doctor().stdout
    assert ", ".join(line[:-1] for line in shown.splitlines() if line.endswith(":")) == SECTIONS
    assert "  a region on cpu works: ok\n" in shown
    assert f"  torch: {torch.__version__}\n" in shown


def test_it_shows_the_engine_and_its_origin(engine):
    found = examine()[1]["engine"]
    assert found["name"] == engine
    if engine == "reference":
        assert found["from"] == "the package, in Python; caches no weights"
    else:
        origin, _, library = found["from"].partition(": ")
        assert origin in ("came with polycast", "compiled here")
        assert os.path.isfile(library)


def test_it_shows_the_origin_of_ops(hand_made, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "true")  # a compiler that says nothing of itself, and is not called for more
    monkeypatch.setattr(load, "_origins", {})
    monkeypatch.setattr(load, "find_prebuilt", lambda library: None)
    hand_made("cpu", ops_in_cpp=["polycast_plugins.quantize.cpu.native"])
    _, found = examine()
    assert found["ops"] == [
        {"package": f"polycast_plugins.{name}.native", "from": "not compiled yet; `polycast build` does it"}
        for name in ("quantize.cpu", "fastest")
    ]
    assert "  polycast_plugins.quantize.cpu.native: not compiled yet" in doctor().stdout


def test_it_shows_the_features_of_the_processor():
    _, found = examine()
    assert list(found["cpu"]["features"]) == ["bfloat16", "float16", "VNNI", "AMX", "i8mm"]
    if getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16"):
        assert "avx512_bf16" in found["cpu"]["features"]["bfloat16"]


@pytest.mark.parametrize(
    ("text", "name", "amx"),
    [
        ("model name\t: A: fast\nflags : amx_tile\n\nmodel name\t: B\nflags : sse\n", "A: fast", ["amx_tile"]),
        ("CPU part : 0xd40\n", platform.processor() or platform.machine(), []),
        (None, platform.processor() or platform.machine(), []),
    ],
    ids=["two processors", "one without a name", "no file"],
)
def test_the_first_processor_of_the_system_counts(monkeypatch, tmp_path, text, name, amx):
    monkeypatch.setattr(examining, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    _, found = examine()
    assert (found["cpu"]["name"], found["cpu"]["features"]["AMX"]) == (name, amx)


def test_only_relevant_variables_are_shown(engine, monkeypatch):
    monkeypatch.setenv("POLYCAST_BLOCK", "xpu")
    monkeypatch.setenv("ACME_TOKEN", "secret")
    _, found = examine()
    assert found["environment"]["POLYCAST_BLOCK"] == "xpu"
    assert "\n  POLYCAST_BLOCK: xpu\n" in doctor().stdout
    assert "ACME_TOKEN" not in found["environment"]


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    monkeypatch.setenv("POLYCAST_ENGINE", "reference")
    found = examine()[1]["compiler"]
    assert (found["command"], found["path"]) == ("no-such-compiler -O1", None)
    assert "compiler:\n  command: no-such-compiler -O1\n  path: there is none\nengine:" in doctor().stdout


def test_an_unavailable_engine_is_reported_with_the_reason(monkeypatch):
    monkeypatch.setenv("POLYCAST_ENGINE", "auto")
    monkeypatch.setattr(load, "try_build", lambda _: no_compiler())
    installation.forget_choice()
    status, found = examine()
    installation.forget_choice()
    assert "no C++ compiler is found" in found["engine"]["native_engine"]
    assert (status, found["engine"]["name"]) == (0, "reference")


def test_an_invalid_variable_is_reported_and_the_other_sections_are_shown(monkeypatch):
    monkeypatch.setenv("POLYCAST_DISCOVERY", "perhaps")
    monkeypatch.setattr(registry, "_discovered", None)
    monkeypatch.setattr(registry, "ready", {})
    status, found = examine()
    assert problems(found)["the backends are found"].startswith("ValueError: POLYCAST_DISCOVERY='perhaps' is invalid")
    assert found["versions"]["torch"] == torch.__version__
    assert status == 1


def test_a_broken_plugin_is_reported_and_does_not_affect_others(engine, plugin):
    plugin("acme_broken", "raise RuntimeError('the driver is gone')\n")
    status, found = examine()
    ((name, problem),) = problems(found).items()
    assert name == "the backend of ipu is valid"
    assert "the driver is gone" in problem
    assert "a region on cpu works" in [check["name"] for check in found["checks"]]
    assert status == 1


def no_kernel(*_, **__):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("autocast", "problem"),
    [
        (functools.partial(polycast.autocast, enabled=False), "an output is torch.float32, expected torch.bfloat16"),
        (no_kernel, "RuntimeError: no kernel image is available"),
    ],
    ids=["no cast", "error"],
)
def test_a_region_that_does_not_work_is_reported(engine, monkeypatch, autocast, problem):
    monkeypatch.setattr(examining, "autocast", autocast)
    status, found = examine()
    ((name, said),) = problems(found).items()
    assert (name, status) == ("a region on cpu works", 1)
    assert said.startswith(problem)


@pytest.mark.parametrize("error", [SystemExit("no board"), UserWarning("no board")], ids=["exit", "warning"])
def test_what_a_plugin_or_a_driver_raises_is_reported(hand_made, monkeypatch, error):
    def fail(**_):
        raise error

    hand_made("hpu", availability=fail)
    hand_made("cpu", supported_dtypes=fail, device_details=fail)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", fail)
    _, found = examine()
    rows = {device["device_type"]: device for device in found["backends"]}
    assert (rows["hpu"]["state"], rows["hpu"]["reason"]) == ("unavailable", "no board")
    assert rows["cpu"]["supported_dtypes"] is None
    assert found["accelerator"] == f"{type(error).__name__}: no board"


@pytest.mark.parametrize("limits", [[], ["OMP_THREAD_LIMIT"], ["OMP_DYNAMIC", "OMP_THREAD_LIMIT"]], ids=len)
def test_a_wrong_linear_is_reported_with_the_variables_that_may_cause_it(monkeypatch, limits):
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, *args: linear(x, *args) * (2 - (x.dtype is torch.float32))
    )
    for variable in ("OMP_DYNAMIC", "OMP_THREAD_LIMIT"):
        monkeypatch.delenv(variable, raising=False)
    for variable in limits:
        monkeypatch.setenv(variable, "2")
    status, found = examine()
    remedy = f". Unset {' and '.join(limits)}: torch needs as many threads as it asks for" if limits else ""
    assert problems(found)["linear layers on cpu are right"] == (
        "torch's results have a relative error of more than 0.1 (1 x 256: 1; 64 x 256: 1; 128 x 512: 1; 128 x 1024: 1)"
        f"{remedy}"
    )
    assert (status, [found["environment"][each] for each in limits]) == (1, ["2"] * len(limits))


def test_a_slow_dtype_causes_no_warning(hand_made):
    hand_made("cpu", default_dtype=torch.bfloat16, slow_reason=lambda dtype: "it has no such unit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examine()
