"""Plugins as installed distributions, and processes that have them on their path."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BACKEND = """
import torch

import polycast


class AcmeBackend(polycast.plugin.Backend):
    device_type = {device_type!r}
    default_dtype = torch.bfloat16
    policies = {{"aten::mm": polycast.CastPolicy.LOWER_PRECISION_FP}}

    def supported_dtypes(self):
        return (torch.bfloat16, torch.float16)

    def availability(self):
        return polycast.plugin.Availability(True)


@polycast.plugin.hookimpl
def polycast_backend():
    return AcmeBackend()


{amendment}
"""

EXTENSION = """
import torch

import polycast


class Linear(polycast.plugin.LowBitKernel):
    def prepack(self, weight):
        return (weight.clone(),)

    def unsupported_reason(self, x, weight, bias):
        return {refusal!r}

    def run(self, prepacked, x, weight, bias):
        rows, features = x.shape[0], prepacked[0].shape[0]
        return torch.full((rows, features), {mark!r}, dtype=torch.get_autocast_dtype(x.device.type))


class AcmeExtension(polycast.plugin.Extension):
    device_type = {device_type!r}

    def recipe_availability(self, recipe):
        if recipe.kind == {kind!r}:
            return polycast.plugin.Availability(True)
        return super().recipe_availability(recipe)

    def low_bit_kernels(self, recipe):
        return {{"aten::linear": Linear()}}


{amendment}


@polycast.plugin.hookimpl
def polycast_extension():
    return AcmeExtension()
"""


def environment():
    """Return the environment without variables of polycast, with the reference engine."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("POLYCAST_")}
    return {**others, "POLYCAST_ENGINE": "reference"}


@pytest.fixture
def folder(tmp_path):
    """The folder in which a test installs distributions."""
    path = tmp_path / "site"
    path.mkdir()
    return path


@pytest.fixture
def distribution(folder):
    """Return a function that installs a distribution of files and entry points."""

    def install(name, entry_points, files, version="1.0", group="polycast.backends"):
        record = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        files = {
            **files,
            record / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            record / "entry_points.txt": f"[{group}]\n"
            + "".join(f"{device_type} = {value}\n" for device_type, value in entry_points.items()),
        }
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        written = [(folder / path).relative_to(folder).as_posix() for path in (*files, record / "RECORD")]
        (record / "RECORD").write_text("".join(f"{path},,\n" for path in written))
        return record

    return install


@pytest.fixture
def plugin(distribution):
    """Return a function that installs a distribution with one backend, and code appended to its module."""

    def install(name, device_type, amendment="", *, version="1.0"):
        module = name.replace("-", "_")
        source = BACKEND.format(device_type=device_type, amendment=textwrap.dedent(amendment))
        distribution(name, {device_type: module}, {f"{module}.py": source}, version)

    return install


@pytest.fixture
def extension(distribution):
    """Return a function that installs a distribution with an extension of a device."""

    def install(name, device_type="cpu", amendment="", *, kind="none", mark=0.0, refusal=None, entry="", files=None):
        module = name.replace("-", "_")
        source = EXTENSION.format(device_type=device_type, kind=kind, mark=mark, refusal=refusal, amendment=amendment)
        files = {f"{module}.py": source, **(files or {})}
        distribution(name, {entry or device_type: module}, files, group="polycast.extensions")

    return install


@pytest.fixture(scope="session")
def launcher():
    """The process that forks a child for each script."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork a process")
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("launcher.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(launcher, folder):
    """Return a function that runs a script with the plugins on its path, and returns its variable `answer`."""

    def run(script, **environment):
        request = {"script": textwrap.dedent(script), "folders": [str(folder)], "environment": environment}
        launcher.stdin.write(json.dumps(request) + "\n")
        launcher.stdin.flush()
        reply = json.loads(launcher.stdout.readline())
        assert "error" not in reply, reply["error"]
        return reply["answer"]

    return run
