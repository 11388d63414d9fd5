"""``polycast run`` with options, files and variables that are invalid, or that cannot be used on this machine."""

import pytest
import torch

pytestmark = pytest.mark.slow

FILES = {
    "fp23.toml": "schema = 1\n[ops]\nmm = 'fp23'\n",
    "modules.toml": "schema = 1\n[devices.cpu.modules]\nlm_head = 'fp32'\n",
}
NO_ENGINE = "POLYCAST_ENGINE=native, but the native engine cannot be built"
NO_OBSERVER = "polycast.observe needs the native engine, and this process runs on the reference engine: "
NO_COMPILER = {"CXX": "no-such-compiler"}
REFUSED = {
    "not a device": ("--wrap=not a real device", {}, "Invalid device string: 'not a real device'. "),
    "no backend": ("--wrap=hpu", {}, "No polycast backend is installed for 'hpu'."),
    "no hardware": ("--wrap=xpu", {}, "--wrap xpu: "),
    "no such dtype": (
        "--wrap=cpu:bfloat61",
        {},
        "--wrap cpu:bfloat61: 'bfloat61' is not a dtype; the nearest are 'bfloat16', 'float64', 'float16'. "
        "Expected DEVICE or DEVICE:DTYPE; cpu supports bfloat16, float16.\n",
    ),
    "an empty dtype": ("--wrap=cpu:", {}, "--wrap cpu:: '' is not a dtype"),
    "no dtype": ("--wrap=cpu:Tensor", {}, "--wrap cpu:Tensor: 'Tensor' is not a dtype"),
    "another dtype": ("--wrap=cpu:int8", {}, "--wrap cpu:int8: cpu supports torch.bfloat16, torch.float16.\n"),
    "a missing policy": ("--policy=none.toml", {}, "[Errno 2] No such file or directory: 'none.toml'\n"),
    "a bad policy": ("--policy=fp23.toml", {}, "policy file 'fp23.toml': the policy of 'mm' must be a CastPoli"),
    "rules for modules": (
        "--policy=modules.toml",
        {},
        "--policy modules.toml: the file has rules for modules, which --policy cannot apply. Call "
        "polycast.apply_policy(model, policy) in the program, or leave [modules] out of the file.\n",
    ),
    "no recipe": ("--recipe=int9", {}, "--recipe: 'int9' is not a recipe: did you mean 'int8'?\n"),
    "no such scales": ("--recipe=int8:columns", {}, "--recipe: 'int8:columns' is not a recipe: "),
    "a report in no folder": (
        "--report=missing/out.html",
        {},
        "--report: missing/out.html cannot be written: missing does not exist.",
    ),
    "a folder as report": ("--report=.", {}, "--report: . is a folder: name a file in it, such as report.html.\n"),
    "no name of a report": ("--report=", {}, "--report: . is a folder"),
    "a report in /proc": ("--report=/proc/out.html", {}, "--report: /proc/out.html cannot be written: "),
    "an engine": ("--quiet", {"POLYCAST_ENGINE": "fast"}, "POLYCAST_ENGINE='fast' is invalid"),
    "no compiler": ("--quiet", NO_COMPILER | {"POLYCAST_ENGINE": "native"}, NO_ENGINE),
    "no compiler for an observer": ("--observe", NO_COMPILER, f"{NO_OBSERVER}the native engine cannot be built"),
    "no compiler for a report": ("--report=out.html", NO_COMPILER, f"{NO_OBSERVER}the native engine cannot be built"),
    "an engine for an observer": (
        "--observe",
        {"POLYCAST_ENGINE": "reference"},
        f"{NO_OBSERVER}POLYCAST_ENGINE=reference. Unset it.\n",
    ),
    "an engine for a report": (
        "--report=out.html",
        {"POLYCAST_ENGINE": "reference"},
        f"{NO_OBSERVER}POLYCAST_ENGINE=reference. Unset it.\n",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_invalid_or_not_there_is_refused_before_the_program_runs(run, tmp_path, case):
    option, environment, said = REFUSED[case]
    if option == "--wrap=xpu" and torch.xpu.is_available():
        pytest.skip("there is an XPU here")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = run("print('it ran')", option, XDG_CACHE_HOME=str(tmp_path / "cache"), **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"polycast: {said}")


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "Usage: polycast run"), (["--unknown", "program.py"], "No such option")]
)
def test_a_wrong_command_line_shows_the_usage(polycast_run, arguments, said):
    done = polycast_run(*arguments, COLUMNS="300")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
