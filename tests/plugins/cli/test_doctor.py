"""`polycast doctor`: what it says of a machine that works, and of one that does not."""

import functools
import json
import os
import platform
import subprocess
import sys
import warnings

import pytest
import torch
from typer.testing import CliRunner

import polycast
from polycast.registry.registry import registry
from polycast.toolchain import load
from polycast_plugins.cli import app, doctor

SECTIONS = [
    "versions",
    "compiler",
    "engine",
    "cpu",
    "accelerator",
    "environment",
    "plugins",
    "backends",
    "ops",
    "profiles",
    "checks",
    "changes to torch",
]
BROKEN = "raise RuntimeError('the driver is gone')\n"


@pytest.fixture
def examine():
    """Return a function that runs the command in this process, and returns its status and what it found."""

    def examine():
        result = CliRunner().invoke(app, ["doctor", "--json"])
        return result.exit_code, json.loads(result.stdout)

    return examine


def problems(found):
    return {check["name"]: check["problem"] for check in found["checks"] if check["problem"] is not None}


def test_a_working_machine_has_no_problems(engine, examine):
    status, found = examine()
    assert problems(found) == {}
    assert [check["name"] for check in found["checks"]][:1] == ["a region on cpu works"]
    assert status == 0


def test_it_prints_every_section(engine):
    result = CliRunner().invoke(app, ["doctor"])
    assert [line[:-1] for line in result.stdout.splitlines() if line.endswith(":")] == SECTIONS
    assert "  a region on cpu works: ok\n" in result.stdout
    assert f"  torch: {torch.__version__}\n" in result.stdout


def test_json_has_every_section(engine, examine):
    _, found = examine()
    assert list(found) == SECTIONS
    assert found["versions"]["python"] == platform.python_version()
    assert {device["device_type"] for device in found["backends"]} == set(polycast.backends())


def test_it_shows_the_engine_and_its_origin(engine, examine):
    _, found = examine()
    assert found["engine"]["name"] == engine
    if engine == "reference":
        assert found["engine"]["from"] == "the package, in Python; caches no weights"
    else:
        origin, _, library = found["engine"]["from"].partition(": ")
        assert origin in ("came with polycast", "compiled here")
        assert os.path.isfile(library)


def test_it_shows_the_origin_of_ops(examine, hand_made, monkeypatch, tmp_path):
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
    assert "  polycast_plugins.quantize.cpu.native: not compiled yet" in CliRunner().invoke(app, ["doctor"]).stdout


def test_it_shows_the_features_of_the_processor(examine):
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
def test_the_first_processor_of_the_system_counts(examine, monkeypatch, tmp_path, text, name, amx):
    monkeypatch.setattr(doctor, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    _, found = examine()
    assert (found["cpu"]["name"], found["cpu"]["features"]["AMX"]) == (name, amx)


def test_only_relevant_variables_are_shown(engine, examine, monkeypatch):
    monkeypatch.setenv("POLYCAST_BLOCK", "xpu")
    monkeypatch.setenv("ACME_TOKEN", "secret")
    _, found = examine()
    assert found["environment"]["POLYCAST_BLOCK"] == "xpu"
    assert "\n  POLYCAST_BLOCK: xpu\n" in CliRunner().invoke(app, ["doctor"]).stdout
    assert "ACME_TOKEN" not in found["environment"]


def test_a_missing_compiler_is_reported(examine, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    monkeypatch.setenv("POLYCAST_ENGINE", "reference")
    _, found = examine()
    assert found["compiler"]["command"] == "no-such-compiler -O1"
    assert found["compiler"]["path"] is None
    said = CliRunner().invoke(app, ["doctor"]).stdout
    assert "compiler:\n  command: no-such-compiler -O1\n  path: there is none\nengine:" in said


@pytest.mark.slow
def test_an_unavailable_engine_is_reported_with_the_reason():
    environment = {**os.environ, "CXX": "no-such-compiler", "XDG_CACHE_HOME": "/nonexistent/cache"}
    command = [sys.executable, "-m", "polycast", "doctor", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    engine = json.loads(result.stdout)["engine"]
    assert engine["name"] == "native" or "no C++ compiler is found" in engine["native_engine"]  # a wheel may have it
    assert result.returncode == 0


def test_an_invalid_variable_is_reported_and_the_other_sections_are_shown(examine, monkeypatch):
    monkeypatch.setenv("POLYCAST_DISCOVERY", "perhaps")
    monkeypatch.setattr(registry, "_discovered", None)
    monkeypatch.setattr(registry, "ready", {})
    status, found = examine()
    assert problems(found)["the backends are found"].startswith("ValueError: POLYCAST_DISCOVERY='perhaps' is invalid")
    assert found["versions"]["torch"] == torch.__version__
    assert status == 1


def test_a_broken_plugin_is_reported_and_does_not_affect_others(engine, examine, plugin):
    plugin("acme_broken", BROKEN)
    status, found = examine()
    (name, problem) = *problems(found), *problems(found).values()
    assert name == "the backend of ipu is valid"
    assert "the driver is gone" in problem
    assert "a region on cpu works" in [check["name"] for check in found["checks"]]
    assert status == 1


def test_a_region_that_does_not_cast_is_reported(engine, examine, monkeypatch):
    monkeypatch.setattr(doctor, "autocast", functools.partial(polycast.autocast, enabled=False))
    status, found = examine()
    problem = problems(found)["a region on cpu works"]
    assert problem.startswith("an output is torch.float32, expected torch.bfloat16")
    assert status == 1


@pytest.mark.parametrize("error", [SystemExit("no board"), UserWarning("no board")], ids=["exit", "warning"])
def test_what_a_plugin_or_a_driver_raises_is_reported(examine, hand_made, monkeypatch, error):
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


def test_an_error_in_a_region_is_reported(engine, examine, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(doctor, "autocast", broken)
    status, found = examine()
    assert problems(found) == {"a region on cpu works": "RuntimeError: no kernel image is available"}
    assert status == 1


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "value"), [("OMP_THREAD_LIMIT", "2"), ("OMP_DYNAMIC", "true")])
def test_wrong_results_of_torchs_linear_layers_are_reported(limit, value):
    if os.cpu_count() < 4:
        pytest.skip("OpenMP gives as many threads as torch asks for")
    environment = {**os.environ, "OMP_NUM_THREADS": "4", limit: value}
    if subprocess.run([sys.executable, "-c", WRONG_LINEAR], env=environment, check=False).returncode != 0:
        pytest.skip("this torch gets them right")
    command = [sys.executable, "-m", "polycast", "doctor", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(result.stdout)
    (name, problem) = *problems(found), *problems(found).values()
    assert name == "linear layers on cpu are right"
    assert problem.startswith("torch's results have a relative error of more than 0.1 (")
    assert problem.endswith(f". Unset {limit}: torch needs as many threads as it asks for")
    assert found["environment"][limit] == value
    assert result.returncode == 1


WRONG_LINEAR = """
import sys, torch
x, w = torch.ones(128, 1024), torch.ones(1024, 1024)
sys.exit(torch.equal(torch.nn.functional.linear(x.bfloat16(), w.bfloat16()).float(), x @ w))
"""


def test_a_wrong_linear_is_reported(examine, monkeypatch):
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, *args: linear(x, *args) * (2 - (x.dtype is torch.float32))
    )
    monkeypatch.delenv("OMP_DYNAMIC", raising=False)
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    status, found = examine()
    assert problems(found)["linear layers on cpu are right"] == (
        "torch's results have a relative error of more than 0.1 (1 x 256: 1; 64 x 256: 1; 128 x 512: 1; 128 x 1024: 1)"
    )
    assert status == 1


def test_a_slow_dtype_causes_no_warning(examine, hand_made):
    hand_made("cpu", default_dtype=torch.bfloat16, slow_reason=lambda dtype: "it has no such unit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examine()


def test_it_leaves_nothing_behind(engine, examine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examine()
    assert polycast.autocast_nesting("cpu") == 0
    assert not torch.is_autocast_enabled("cpu")
