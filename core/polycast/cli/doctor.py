"""``polycast doctor``: what this machine has, and whether a region works on it; to be read, and put in a bug report.

Nothing that is wrong with the machine stops it: what a question raises is its answer.
"""

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..engine.casts.weight_cache import WeightCache
from ..engine.choice import choose
from ..plugins.registry import backends
from ..region.autocast import autocast
from .compiled import origins
from .devices import known_devices
from .terminal import print_json

_CPU_FEATURES = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "avx10_2", "fp16", "fp16_arith", "asimdhp"),
    "VNNI": ("avx512_vnni", "avx_vnni", "vnni"),
    "AMX": ("amx_tile",),
    "i8mm": ("i8mm",),
}
"""What makes a dtype fast, and the names that it has in torch or in /proc/cpuinfo."""
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "TORCHDYNAMO_DISABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "XDG_CACHE_HOME",
)
"""The variables that change what it does, besides those that begin with POLYCAST_."""


@dataclass(frozen=True)
class Check:
    """Something that has to work, and what was wrong; None: nothing."""

    name: str
    problem: str | None


def _answer(question: Callable[[], object]) -> Any:
    """Return what a question returns, or what it raises in words."""
    try:
        return question()
    except Exception as error:  # a driver or a plugin may raise anything
        return f"{type(error).__name__}: {error}"


def _versions() -> dict[str, str]:
    return {
        "polycast": importlib.metadata.version("polycast"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _compiler() -> dict[str, object]:
    command = os.environ.get("CXX", "c++")
    words = shlex.split(command)
    found = shutil.which(words[0]) if words else None
    said = ""
    if found is not None:
        outcome = subprocess.run(
            [*words, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        said = next(iter(outcome.stdout.splitlines()), "")
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return {"command": command, "path": found, "version": said, "python_headers": headers}


def _engine() -> dict[str, object]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = choose()
    return {
        "name": engine.name,
        "from": engine.origin or "the package, in Python",
        "warning": str(told[0].message) if told else None,
    }


def _ops() -> list[dict[str, str]]:
    return [{"package": package, "from": origin} for package, origin in origins().items()]


def _cpu() -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in info.read_text().splitlines()] if info.is_file() else []
    about = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    there = set(about.get("flags", about.get("Features", "")).split())
    there |= {name for name, has in getattr(torch.cpu, "get_capabilities", dict)().items() if has is True}
    return {
        "name": about.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": {feature: sorted(there.intersection(names)) for feature, names in _CPU_FEATURES.items()},
    }


def _accelerator() -> dict[str, object] | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda number: device.type)
    return {
        "type": device.type,
        "devices": [str(name(number)) for number in range(torch.accelerator.device_count())],
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("POLYCAST_") or name in _VARIABLES
    }


def _region_works(device_type: str) -> str | None:
    """Say what is wrong with a region for a device, in forward, in backward and after it."""
    dtype = backends()[device_type].default_dtype
    layer, cache = torch.nn.Linear(64, 64).to(device_type), WeightCache()
    x = torch.ones(4, 64, device=device_type)
    with autocast(device_type, cache=cache):
        layer(x)
        y = layer(x)
    y.float().sum().backward()
    found = {
        "an output": (y.dtype, dtype),
        "a gradient": (layer.weight.grad.dtype if layer.weight.grad is not None else None, torch.float32),
        "the weight's cast, found again": (cache.stats().hits > 0, True),
        "autocast after the region": (torch.is_autocast_enabled(device_type), False),
    }
    wrong = [f"{name} is {seen}, expected {wanted}" for name, (seen, wanted) in found.items() if seen != wanted]
    return "; ".join(wrong) or None


def _checks() -> list[Check]:
    ready = _answer(lambda: [name for name, status in backends().items() if status.state == "ready"])
    if isinstance(ready, str):
        return [Check("the backends are found", ready)]
    checks = [Check(f"a region on {name} works", _answer(partial(_region_works, name))) for name in ready]
    broken = [status for status in backends().values() if status.state in ("broken", "conflict")]
    return checks + [Check(f"the backend of {status.device_type} is sound", status.reason) for status in broken]


def examination() -> dict[str, Any]:
    """Return all that is asked, as JSON-safe values; what could not be answered is a str that says why."""
    return {
        "versions": _answer(_versions),
        "compiler": _answer(_compiler),
        "engine": _answer(_engine),
        "ops": _answer(_ops),
        "cpu": _answer(_cpu),
        "accelerator": _answer(_accelerator),
        "backends": _answer(lambda: [device.as_json() for device in known_devices()]),
        "environment": _answer(_environment),
        "checks": [{"name": check.name, "problem": check.problem} for check in _checks()],
    }


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: an object with the same sections.")] = False,
) -> None:
    """Say what this machine has, and whether regions work on it, for a bug report. The status is 1 if one does not."""
    found = examination()
    wrong = [check for check in found["checks"] if check["problem"] is not None]
    if as_json:
        print_json(found)
    else:
        _print(found)
    if wrong:
        raise typer.Exit(1)


def _print(found: Mapping[str, Any]) -> None:
    for section, said in found.items():
        typer.echo(f"{section}:")
        if section == "backends" and not isinstance(said, str):
            for device in said:
                typer.echo(f"  {device['device_type']}: {_of_device(device)}")
        elif section == "ops" and isinstance(said, list) and said:
            for ops in said:
                typer.echo(f"  {ops['package']}: {ops['from']}")
        elif section == "checks":
            for check in said:
                typer.echo(f"  {check['name']}: {check['problem'] or 'ok'}")
        elif isinstance(said, Mapping):
            for name, value in said.items():
                _print_value(name.replace("_", " "), value)
            if not said:
                typer.echo("  none of those that matter is set")
        else:
            typer.echo(f"  {said or 'none'}")


def _print_value(name: str, value: object) -> None:
    if isinstance(value, Mapping):
        for inner, words in value.items():
            typer.echo(f"  {inner}: {', '.join(words) or 'no'}")
    elif isinstance(value, list):
        typer.echo(f"  {name}: {', '.join(map(str, value))}")
    elif value is not None:
        typer.echo(f"  {name}: {({True: 'yes', False: 'no'}[value]) if isinstance(value, bool) else value}")


def _of_device(device: Mapping[str, Any]) -> str:
    source = f", from {device['distribution']} {device['version']}" if device["distribution"] else ""
    dtypes = f", {', '.join(device['supported_dtypes'])}" if device["supported_dtypes"] else ""
    reason = f" ({device['reason']})" if device["reason"] else ""
    return f"{device['state']}{dtypes}{source}{reason}"
