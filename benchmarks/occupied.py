"""The memory that a model occupies while it decodes: in float32, in regions, with caches and recipes.

Anonymous memory belongs to one process alone, as the kernel counts it in /proc/self/smaps_rollup. Pages of files are
shared by all processes that map them, and can be dropped when memory is short.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

import polycast

from .timing import Result

_MB = 1e6
_SMAPS = Path("/proc/self/smaps_rollup")
_TOKENS = 4


@dataclass(frozen=True)
class Way:
    """A way to run a model.

    Attributes:
        what: its name.
        mapped: whether the weights are mapped from their file; otherwise they are copied into memory.
        region: the arguments of the region; None for no region.
        cached: whether the region has a WeightCache.
        loaded: whether that is loaded from a file.
        copied: whether the weights are copied to bfloat16, and the float32 ones freed.
    """

    what: str
    mapped: bool = True
    region: Mapping[str, Any] | None = None
    cached: bool = False
    loaded: bool = False
    copied: bool = False


def _ways() -> dict[str, Way]:
    recipes = {"a WeightCache": {}, "int8": {"recipe": "int8"}, "int4": {"recipe": "int4"}}
    ways = [Way("a bfloat16 copy", False, copied=True)]
    for mapped in (False, True):
        where = ", weights mapped" if mapped else ""
        ways += [Way(f"float32{where}", mapped), Way(f"a region{where}", mapped, {})]
        ways += [Way(f"{name}{where}", mapped, region, True) for name, region in recipes.items()]
    ways += [Way(f"{name}, weights mapped, cache loaded", True, region, True, True) for name, region in recipes.items()]
    return {way.what: way for way in ways}


WAYS = _ways()
SECOND = "int4, weights mapped, cache loaded"


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def _layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))


def _llama() -> nn.Module:
    from .fastest import llama

    return llama()


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "GPT-2 small": _gpt2,
    "8 x Linear(4096, 4096)": _layers,
    "LLaMA 1.1 B": _llama,
}
_FILE = "model.safetensors"
BOUNDS = {
    ("LLaMA 1.1 B", "int4, weights mapped"): 900.0,
    ("LLaMA 1.1 B", SECOND): 900.0,
}
MAX_OF_SECOND = 0.3 * 2**30 / _MB


def anonymous() -> float:
    """Return the anonymous memory of this process, in MB."""
    (line,) = (line for line in _SMAPS.read_text().splitlines() if line.startswith("Anonymous:"))
    return int(line.split()[1]) * 1024 / _MB


class Occupied:
    """Starts a process for each model and way, and reads its anonymous memory after some tokens."""

    def run(self, quick: bool) -> list[Result]:
        """Return the figures; with `quick`, those of the small model."""
        if not _SMAPS.exists():
            return [Result("anonymous memory", "-", None, None, skipped="only Linux says it")]
        names = list(MODELS)[: 1 if quick else None]
        return [result for name in names for result in _of_model(name)]


def _of_model(name: str) -> list[Result]:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        _child("write", name, folder)
        for what, way in WAYS.items():
            if way.loaded:
                _child("save", name, folder, what)
            measured, why = _measure(name, folder, what)
            bound = BOUNDS.get((name, what))
            results.append(Result(f"{name}, {what}", "-", measured, bound, " MB", skipped=why))
        with _running(name, folder, SECOND) as first:
            measured, why = (None, "int4 is not available") if first is None else _measure(name, folder, SECOND)
            bound = MAX_OF_SECOND if (name, SECOND) in BOUNDS else None
            results.append(Result(f"{name}, {SECOND}, second process", "-", measured, bound, " MB", skipped=why))
    return results


def _child(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", __name__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _measure(name: str, folder: str, what: str) -> tuple[float | None, str]:
    """Return the memory of a process of its own, and why it could not be measured."""
    with _running(name, folder, what) as found:
        return (found, "") if found is not None else (None, "the recipe is not available")


@contextlib.contextmanager
def _running(name: str, folder: str, what: str) -> Iterator[float | None]:
    """Yield the memory of a process, which goes on until the block ends."""
    command = [sys.executable, "-m", __name__, "use", name, folder, what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found: float | None = json.loads(process.stdout.readline().strip() or "null")
        yield found
        process.stdin.close()


def _model_of(folder: str, way: Way) -> nn.Module:
    file = Path(folder) / _FILE
    if (Path(folder) / "config.json").exists():
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        with torch.device("meta"):
            model = _layers()
        model.load_state_dict(safetensors.torch.load_file(file), assign=True)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    if way.copied:
        model.bfloat16()
    if way.mapped:
        polycast.map_weights(model, file)
    return model


def _decode(model: Any, way: Way, cache: polycast.WeightCache | None) -> None:
    region = contextlib.nullcontext() if way.region is None else polycast.autocast("cpu", **way.region, cache=cache)
    with torch.no_grad(), region:
        if not hasattr(model, "generate"):
            for _ in range(_TOKENS):
                model(torch.ones(1, 4096, dtype=next(model.parameters()).dtype))
            return
        model.generate(torch.tensor([[464]]), max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False)


def _cache_file(folder: str, way: Way) -> Path:
    return Path(folder) / f"{way.what.partition(',')[0].replace(' ', '-')}.casts"


def _is_available(way: Way) -> bool:
    recipe = (way.region or {}).get("recipe")
    if recipe is None:
        return True
    try:
        return bool(polycast.plugin.check(polycast.plugin.get_backend("cpu"), getattr(polycast, recipe.capitalize())()))
    except AttributeError:
        return False


def _write(name: str, folder: str) -> None:
    model: Any = MODELS[name]()
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        polycast.map_weights(model, Path(folder) / _FILE)


def _save(name: str, folder: str, what: str) -> None:
    way = WAYS[what]
    if _is_available(way):
        model, cache = _model_of(folder, way), polycast.WeightCache()
        _decode(model, way, cache)
        cache.save(_cache_file(folder, way), model)


def _use(name: str, folder: str, what: str) -> None:
    way = WAYS[what]
    if not _is_available(way):
        print("null", flush=True)
        return
    model = _model_of(folder, way)
    cache = None
    if way.loaded:
        cache = polycast.WeightCache.load(_cache_file(folder, way), model)
    elif way.cached:
        cache = polycast.WeightCache()
    _decode(model, way, cache)
    print(json.dumps(anonymous()), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    sys.modules["torchao"] = None  # type: ignore[assignment]  # transformers would import it
    {"write": _write, "save": _save, "use": _use}[sys.argv[1]](*sys.argv[2:])
