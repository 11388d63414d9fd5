"""``polycast doctor``: describe this machine for a bug report, and check that regions work on it.

An error in one section is reported as the answer of that section.
"""

import dataclasses
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from polycast import WeightCache, __version__, autocast, backends
from polycast.plugin import Feature, choose_engine, manifests

from .build import origins
from .devices import known_devices
from .terminal import console, print_json, print_line

_CPU_FEATURES = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "avx10_2", "fp16", "fp16_arith", "asimdhp"),
    "VNNI": ("avx512_vnni", "avx_vnni", "vnni"),
    "AMX": ("amx_tile",),
    "i8mm": ("i8mm",),
}
"""CPU features for fast low precision, and their flags in torch or in /proc/cpuinfo."""
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "OMP_DYNAMIC",
    "OMP_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "ONEDNN_MAX_CPU_ISA",
    "TORCHDYNAMO_DISABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "XDG_CACHE_HOME",
)
"""The environment variables that matter, besides those that begin with POLYCAST_."""
_CPU_INFO = Path("/proc/cpuinfo")


def _try(function: Callable[[], object]) -> Any:
    """Return the result of a function, or its error as text."""
    try:
        return function()
    except (Exception, SystemExit) as error:  # a driver or a plugin may raise anything
        return f"{type(error).__name__}: {error}"


def _versions() -> dict[str, str]:
    return {
        "polycast": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _compiler() -> dict[str, object]:
    command = os.environ.get("CXX", "c++")
    words = shlex.split(command)
    found = shutil.which(words[0]) if words else None
    version = ""
    if found is not None:
        outcome = subprocess.run(
            [*words, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        version = next(iter(outcome.stdout.splitlines()), "")
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return {"command": command, "path": found, "version": version, "python_headers": headers}


def _engine() -> dict[str, object]:
    engine = choose_engine()
    return {
        "name": engine.name,
        "from": engine.origin or "the package, in Python; caches no weights",
        "native_engine": f"cannot be built: {engine.build_failure}" if engine.build_failure else None,
    }


def _ops() -> list[dict[str, str]]:
    return [{"package": package, "from": origin} for package, origin in origins().items()]


def _cpu() -> dict[str, object]:
    about = _cpu_info()
    there = set(about.get("flags", about.get("Features", "")).split())
    there |= {name for name, has in getattr(torch.cpu, "get_capabilities", dict)().items() if has is True}
    return {
        "name": about.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": {feature: sorted(there.intersection(names)) for feature, names in _CPU_FEATURES.items()},
    }


def _cpu_info() -> dict[str, str]:
    """Return what Linux says in ``/proc/cpuinfo``, by the first processor that says it; empty on other systems."""
    if not _CPU_INFO.is_file():
        return {}
    lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}


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
    """Return the problem of a region for a device, in it, its backward or after it; None if there is none."""
    dtype = backends()[device_type].default_dtype
    layer, cache = torch.nn.Linear(64, 64).to(device_type), WeightCache()
    x = torch.ones(4, 64, device=device_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other sections report the engine and slow dtypes
        with autocast(device_type, cache=cache):
            layer(x)
            y = layer(x)
    y.float().sum().backward()
    found = {
        "an output": (y.dtype, dtype),
        "a gradient": (layer.weight.grad.dtype if layer.weight.grad is not None else None, torch.float32),
        "a hit of the weight cache": (cache.stats().hits > 0, choose_engine().caches),
        "autocast after the region": (torch.is_autocast_enabled(device_type), False),
    }
    wrong = [f"{name} is {seen}, expected {wanted}" for name, (seen, wanted) in found.items() if seen != wanted]
    return "; ".join(wrong) or None


def _linears_are_right(device_type: str) -> str | None:
    """Return how wrong torch's linear layers are in the fast dtype of a device; None if they are right."""
    dtype = backends()[device_type].default_dtype
    wrong = []
    for rows, size in _LINEARS:
        numbers = torch.randn(rows + size, size, generator=torch.Generator().manual_seed(0)).to(device_type)
        x, weight = numbers[:rows], numbers[rows:]
        exact = torch.nn.functional.linear(x, weight)
        error = torch.nn.functional.linear(x.to(dtype), weight.to(dtype)).float() - exact
        relative = float(error.norm() / exact.norm())
        if not relative <= _MAX_ERROR:
            wrong.append(f"{rows} x {size}: {relative:.2g}")
    if not wrong:
        return None
    limits = [name for name in ("OMP_DYNAMIC", "OMP_THREAD_LIMIT") if name in os.environ]
    remedy = f". Unset {' and '.join(limits)}: torch needs as many threads as it asks for" if limits else ""
    return f"torch's results have a relative error of more than {_MAX_ERROR} ({'; '.join(wrong)}){remedy}"


_LINEARS = ((1, 256), (64, 256), (128, 512), (128, 1024))
"""Rows and features of the layers, among them some that oneDNN computes wrongly with fewer threads than requested."""
_MAX_ERROR = 0.1


def _ready() -> list[str]:
    return [name for name, status in backends().items() if status.is_usable]


def _checks() -> Iterator[dict[str, str | None]]:
    """Yield the checks with their problems; None: it passed."""
    statuses = _try(lambda: list(backends().values()))
    if isinstance(statuses, str):
        yield {"name": "the backends are found", "problem": statuses}
        return
    for check, problem in (
        ("a region on {} works", _region_works),
        ("linear layers on {} are right", _linears_are_right),
    ):
        for name in _ready():
            yield {"name": check.format(name), "problem": _try(partial(problem, name))}
    for status in statuses:
        if status.state in ("broken", "conflict"):
            yield {"name": f"the backend of {status.device_type} is valid", "problem": status.reason}


def _plugins() -> Iterator[dict[str, object]]:
    for each in manifests():
        adds = {
            field.name: list(getattr(each.plugin, field.name))
            for field in dataclasses.fields(each.plugin)
            if field.name != "api"
        }
        yield {
            "name": each.name,
            "distribution": each.distribution,
            "version": each.version,
            "adds": {what: names for what, names in adds.items() if names},
            "problem": each.problem or None,
        }


def _lines_of(resolve: Callable[[str], Any], path: str) -> Iterator[str]:
    yield from resolve(path)()


def _sections() -> Mapping[str, Callable[[], Any]]:
    """Return a function for each section that returns, or yields, JSON values; the last ones import plugins."""
    of_plugins = {
        title: partial(_lines_of, each.resolve, path)
        for each in manifests()
        for title, path in each.plugin.doctor.items()
    }
    return {
        "versions": _versions,
        "compiler": _compiler,
        "engine": _engine,
        "cpu": _cpu,
        "accelerator": _accelerator,
        "environment": _environment,
        "plugins": _plugins,
        "backends": lambda: (device.as_json() for device in known_devices()),
        "ops": _ops,
        **of_plugins,
        "checks": _checks,
        "changes to torch": lambda: (
            {"name": each.name, "refused": why or None} for each, why in Feature.made().items()
        ),
    }


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with what each plugin adds.")] = False,
) -> None:
    """Describe this machine for a bug report, and check that regions work on it.

    The exit status is 1 if a check fails.
    """
    found, out = {}, console()

    def show(line: str) -> None:
        if not as_json:
            print_line(out, line)

    for section, find in _sections().items():
        show(f"{section}:")
        found[section] = _try(partial(_show, section, find, show))
        if isinstance(found[section], str):  # the error
            show(f"  {found[section]}")
    if as_json:
        print_json(found)
    if any(check["problem"] is not None for check in found["checks"]):
        raise typer.Exit(1)


_LISTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "backends": lambda device: f"{device['device_type']}: {_of_device(device)}",
    "ops": lambda ops: f"{ops['package']}: {ops['from']}",
    "checks": lambda check: f"{check['name']}: {check['problem'] or 'ok'}",
    "changes to torch": lambda change: f"{change['name']}: {change['refused'] or 'made'}",
    "plugins": lambda each: f"{each['name']} of {each['distribution']} {each['version']}: {each['problem'] or 'ready'}",
}
"""The line of an item, in the sections that are lists of dicts. Other lists have lines."""


def _show(section: str, find: Callable[[], Any], show: Callable[[str], None]) -> Any:
    """Return what a section has; show its lines, those of a list as they are known."""
    content = find()
    if content is None or isinstance(content, Mapping):
        for line in _lines(section, content):
            show(line)
        return content
    items = []
    for item in content:
        items.append(item)
        show(f"  {_LISTS[section](item) if section in _LISTS else item}")
    if not items:
        show("  none")
    return items


def _lines(section: str, content: Mapping[str, Any] | None) -> Iterator[str]:
    if content is None:
        yield "  none"
    elif section == "environment":
        yield from (f"  {name}: {value}" for name, value in content.items())
        if not content:
            yield "  no relevant variable is set"
    else:
        if section == "compiler" and content["path"] is None:
            content = {"command": content["command"], "path": "there is none"}
        for name, value in content.items():
            yield from _of_value(name.replace("_", " "), value)


def _of_value(name: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner, words in value.items():
            yield f"  {inner}: {', '.join(words) or 'no'}"
    elif isinstance(value, list):
        yield f"  {name}: {', '.join(map(str, value))}"
    elif value is not None:
        yield f"  {name}: {({True: 'yes', False: 'no'}[value]) if isinstance(value, bool) else value}"


def _of_device(device: Mapping[str, Any]) -> str:
    source = f", from {device['distribution']} {device['version']}" if device["distribution"] else ""
    dtypes = f", {', '.join(device['supported_dtypes'])}" if device["supported_dtypes"] else ""
    reason = f" ({device['reason']})" if device["reason"] else ""
    return f"{device['state']}{dtypes}{source}{reason}"
