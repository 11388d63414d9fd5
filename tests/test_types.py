"""Type checkers see the public names, with their types, and no others."""

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

import polycast

pytestmark = pytest.mark.slow
CORE = str(Path(polycast.__file__).parents[1])
RIGHT = """
import torch

import polycast
from polycast import Int8, Policy, WeightCache, autocast
from polycast_plugins.precision import ModelExplanation

version: str = polycast.__version__
region: polycast.autocast = autocast("cpu", cache=WeightCache(), policy=Policy({"softmax": "fp32"}), recipe=Int8())
with region:
    found: polycast.DeviceProfile = polycast.profile("cpu")
op: polycast.Explanation = polycast.explain("linear", device_type="cpu")
model: ModelExplanation = polycast.explain(torch.nn.Linear(1, 1), torch.ones(1, 1), device_type="cpu")
y: torch.Tensor = polycast.out_dtype(torch.ops.aten.mm.default, torch.float32, torch.ones(1), torch.ones(1))
"""
WRONG = """
import polycast

polycast.autocat("cpu")
"""
SETTINGS = """
[mypy]
strict = true
[mypy-torch._dynamo.*,torch._inductor.*,torch.distributed.*,torch.fx.*,sympy.*,numpy.*]
follow_imports = skip
[mypy-polycast.*,polycast_plugins.*]
ignore_errors = true
"""
"""Half of the time goes to what the public names do not use. `make check` has no settings like these."""


def mypy(*files):
    pytest.importorskip("mypy", reason="it is installed with the development tools")
    Path("mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", *files]
    # mypy refuses a path that it searches anyway.
    path = {} if CORE in site.getsitepackages() else {"MYPYPATH": CORE}
    return subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, check=False)


def pyright(*files):
    pytest.importorskip("pyright", reason="it is installed with the development tools")
    Path("pyrightconfig.json").write_text(json.dumps({"extraPaths": [CORE], "typeCheckingMode": "strict"}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "errors," not in done.stdout and "0 errors" not in done.stdout:
        pytest.skip(f"pyright cannot be downloaded: {done.stderr[-200:]}")
    return done


@pytest.mark.parametrize("check", [mypy, pyright])
def test_a_name_that_is_wrong_is_an_error_and_one_that_is_right_has_its_type(check, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("right.py").write_text(RIGHT)
    Path("wrong.py").write_text(WRONG)
    done = check("right.py", "wrong.py")
    assert done.returncode == 1
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert any("autocat" in error for error in errors), done.stdout
    assert all("wrong.py" in error for error in errors), done.stdout
