"""Plugins as installed distributions, and scripts that have them on their path."""

import json
import os
import textwrap

import pytest
import torch

from polycast import CastPolicy
from polycast.plugin import Availability, Backend

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

PRELUDE = """
import dataclasses, json, os, signal, sys, warnings
import polycast, torch

signal.alarm(300)  # seconds after which a script that hangs is killed; one may have to build the native engine
sys.path.insert(0, sys.argv[1])


def error_of(function, *arguments):
    try:
        function(*arguments)
    except BaseException as error:
        chain = [error] if error.__cause__ is None else [error, error.__cause__]
        return [part for link in chain for part in (type(link).__name__, str(link))]
    return None


def caught(function, times=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            function()
    return [(each.category.__name__, str(each.message), each.filename) for each in caught]


def register_by_hand(device_type):
    from polycast_backends.cpu import CpuBackend

    backend = CpuBackend()
    backend.device_type = device_type
    polycast.plugin.register_backend(backend)
    return backend


"""
"""The beginning of each script.

`error_of` returns the name and the text of a call's exception, and of its cause; `caught`, the warnings of calls.
"""
EPILOGUE = """
def as_json(value):
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)


print("\\n" + json.dumps(answer, default=as_json), flush=True)
os._exit(0)  # which is faster
"""


class HpuBackend(Backend):
    api = 1
    device_type = "hpu"
    default_dtype = torch.bfloat16
    policies = {"aten::mm": CastPolicy.LOWER_PRECISION_FP}

    def supported_dtypes(self):
        return [torch.bfloat16, torch.float16]

    def availability(self):
        return Availability(True)


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
def launched(start_launcher):
    """Run scripts in forks of a process that has imported torch and polycast, and has looked up no backend."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork a process")
    prepare = "import warnings; warnings.simplefilter('ignore'); import torch, polycast"
    return start_launcher(prepare, environment())


@pytest.fixture
def run(launched, folder):
    """Return a function that runs a script with the plugins on its path, and returns its variable `answer`."""

    def run(script, **variables):
        script = f"{PRELUDE}{textwrap.dedent(script)}{EPILOGUE}"
        done = launched(script, str(folder), environment={**environment(), **variables})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
