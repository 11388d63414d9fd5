"""The sides of the benchmark `llama-cpp`: a LLaMA in one way, in a process of its own that answers on pipes.

`python -m benchmarks.llama_sides FOLDER int8` is such a process. It loads what is in the folder, and answers each line
of its stdin, a request as JSON, by a line. The sides of torch map the float32 weights from their file, and what
polycast has saved of them.
"""

import inspect
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

import polycast

from . import gguf_files
from .fastest import measure_profile

FLOAT32, COPY, TORCH = "float32", "a bfloat16 copy", "torch.autocast"
PLAIN, CACHED, FASTEST, INT8, INT4 = "a plain region", "WeightCache", "fastest", "int8", "int4"
INT4_64, INT4_128 = "int4, groups of 64", "int4, groups of 128"
COMPILED = ", compiled"
INT8_COMPILED, INT4_COMPILED = INT8 + COMPILED, INT4 + COMPILED
TORCHAO_8, TORCHAO_4 = "torchao, int8", "torchao, int4"
LONGEST, OF_SEVERAL, MOST_SEQUENCES = 2048, 512, 8
"""The longest context of one sequence, that of each of several, and their number."""
CELLS = {1: LONGEST + 256, MOST_SEQUENCES: OF_SEVERAL + 256}
_CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""The argument's name in this version of transformers."""
_SMAPS = Path("/proc/self/smaps_rollup")


class Step(NamedTuple):
    """A forward pass with keys and values of earlier tokens.

    Attributes:
        tokens: the number of new tokens of each sequence.
        context: the number of earlier ones.
        sequences: the number of sequences.
    """

    tokens: int
    context: int = 0
    sequences: int = 1

    def __str__(self) -> str:
        """Return its name in tables."""
        what = f"{self.tokens} token{'s' if self.tokens > 1 else ''}"
        after = f" after {self.context:,}" if self.context else ""
        return f"{what}{after}, {self.sequences} sequences" if self.sequences > 1 else f"{what}{after}"


class Side(Protocol):
    """A loaded model."""

    def set_threads(self, threads: int) -> None:
        """Compute on a number of threads from now on."""

    def run(self, step: Step) -> None:
        """Make a step, and forget its tokens."""

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits after the last of some tokens."""

    def save(self) -> None:
        """Save what other processes of this kind load."""


def ids(count: int) -> list[int]:
    """Return tokens that are the same on all sides."""
    return [(7919 * place + 464) % 512 for place in range(count)]


class LlamaCpp:
    """llama.cpp with a file in one of its formats."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._kept = folder, dict.fromkeys(CELLS, 0)
        self._model = gguf_files.Model(folder / f"{name}.gguf", CELLS, exact=name == "F32")

    def set_threads(self, threads: int) -> None:
        """Compute on a number of threads from now on."""
        self._model.set_threads(threads)

    def run(self, step: Step) -> None:
        """Make a step, and forget its tokens."""
        contexts = min(each for each in CELLS if each >= step.sequences)
        if step.context > self._kept[contexts]:
            self._model.load(self._folder / f"{contexts}.state", contexts)
        self._kept[contexts] = step.context
        self._model.decode(ids(step.tokens), step.context, step.sequences)

    def save(self) -> None:
        """Write the keys and values of contexts for all formats of llama.cpp."""
        for most, count in ((1, LONGEST), (MOST_SEQUENCES, OF_SEVERAL)):
            self._model.decode(ids(count), most=most)
            self._model.save(self._folder / f"{most}.state", most)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits after the last of some tokens."""
        self._model.decode(tokens)
        return self._model.logits()


@dataclass(frozen=True)
class Way:
    """A way of torch or polycast to run a model.

    Attributes:
        region: makes the region from a WeightCache; None for no region.
        cached: whether the region has a WeightCache, which is loaded from its file.
        change: changes the loaded model.
        compiled: whether ``torch.compile`` compiles the model.
    """

    region: Callable[..., AbstractContextManager[Any]] | None = None
    cached: bool = False
    change: Callable[[nn.Module], object] = nn.Module.eval
    compiled: bool = False


def _recipe(recipe: str | polycast.plugin.Recipe | None) -> Way:
    return Way(lambda cache: polycast.autocast("cpu", recipe=recipe, cache=cache), cached=True)


def _quantized(name: str, **options: Any) -> Callable[[nn.Module], object]:
    """Return a function that quantizes a bfloat16 copy of the model by a config of torchao."""

    def change(model: nn.Module) -> None:
        from torchao import quantization

        quantization.quantize_(model.bfloat16(), getattr(quantization, name)(**options))

    return change


WAYS: Mapping[str, Way] = {
    FLOAT32: Way(),
    COPY: Way(change=nn.Module.bfloat16),
    TORCH: Way(lambda _: torch.autocast("cpu")),
    PLAIN: Way(lambda _: polycast.autocast("cpu")),
    CACHED: _recipe(None),
    FASTEST: _recipe("fastest"),
    INT8: _recipe("int8"),
    INT4: _recipe("int4"),
    INT4_64: _recipe(polycast.Int4(64)),
    INT4_128: _recipe(polycast.Int4(128)),
    INT8_COMPILED: replace(_recipe("int8"), compiled=True),
    INT4_COMPILED: replace(_recipe("int4"), compiled=True),
    TORCHAO_8: Way(change=_quantized("Int8DynamicActivationInt8WeightConfig")),
    TORCHAO_4: Way(change=_quantized("Int4WeightOnlyConfig", int4_packing_format="plain_int32")),
}


class Torch:
    """A model of transformers, run by torch in a way."""

    def __init__(self, folder: Path, name: str) -> None:
        self._way = way = WAYS[name]
        self._path = folder / f"{name.removesuffix(COMPILED)}.safetensors".replace(" ", "-")
        self._model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        way.change(self._model)
        self._call = torch.compile(self._model) if way.compiled else self._model
        cache = None
        if way.cached:
            cache = (
                polycast.WeightCache.load(self._path, self._model) if self._path.exists() else polycast.WeightCache()
            )
        self._cache = cache
        self._region = self._new_region()
        self._contexts: dict[tuple[int, int], DynamicCache] = {}

    def save(self) -> None:
        """Save what polycast makes of the weights, for processes that are started later."""
        if self._cache is not None:
            self.run(Step(1))
            self._cache.save(self._path, self._model)

    def _new_region(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._way.region is None else self._way.region(self._cache)

    def set_threads(self, threads: int) -> None:
        """Compute on a number of threads from now on, and choose by the profile of that number."""
        if self._way.compiled and threads != torch.get_num_threads():
            torch.compiler.reset()  # the generated code is for a number of threads
            self._call = torch.compile(self._model)
        torch.set_num_threads(threads)
        if self._way is WAYS[FASTEST]:
            measure_profile("cpu")
        self._region = self._new_region()

    def _forward(self, tokens: list[list[int]], earlier: DynamicCache) -> torch.Tensor:
        with torch.inference_mode(), self._region:
            out = self._call(torch.tensor(tokens), logits_to_keep=1, **{_CACHE: earlier})
            logits: torch.Tensor = out.logits
        return logits

    def _context(self, step: Step) -> DynamicCache:
        """Return the keys and values of random tokens, in the dtypes in which this way keeps them."""
        key = step.context, step.sequences
        if key not in self._contexts:
            made, context = DynamicCache(), DynamicCache()
            self._forward([[0]], made)
            for number, layer in enumerate(made.layers):
                shape = (step.sequences, layer.keys.shape[1], step.context, layer.keys.shape[3])
                each = [torch.randn(shape).to(values.dtype) for values in (layer.keys, layer.values)]
                context.update(*each, number)
            self._contexts[key] = context
        return self._contexts[key]

    def run(self, step: Step) -> None:
        """Make a step, and forget its tokens."""
        earlier = self._context(step) if step.context else DynamicCache()
        self._forward([ids(step.tokens)] * step.sequences, earlier)
        if step.context:
            earlier.crop(-step.tokens)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits after the last of some tokens."""
        return self._forward([tokens], DynamicCache())[0, -1]


def memory() -> dict[str, float]:
    """Return the anonymous memory of this process, and the resident part of the files that it maps, in MB."""
    lines = [line.split() for line in _SMAPS.read_text().splitlines()[1:]]
    sizes = {line[0].rstrip(":"): int(line[1]) * 1024 / 1e6 for line in lines}
    return {"anonymous": sizes["Anonymous"], "mapped": sizes["Rss"] - sizes["Anonymous"]}


def seconds(side: Side, step: Step, calls: int) -> float:
    """Return the least seconds of some steps. The first is left out if there are several: other threads still wait."""
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        side.run(step)
        taken.append(time.perf_counter() - start)
    return min(taken[1:] or taken)


def load(folder: Path, name: str) -> Side:
    """Return a side by its name."""
    return Torch(folder, name) if name in WAYS else LlamaCpp(folder, name)


def answer(side: Side, request: Mapping[str, Any]) -> Any:
    """Return the answer to a request."""
    if "threads" in request:
        return side.set_threads(request["threads"])
    if "step" in request:
        return seconds(side, Step(*request["step"]), request["calls"])
    return side.save()


def _serve(folder: str, name: str, threads: str) -> None:
    """Load a side, and say what it takes with its first token, or why it cannot run; then answer requests."""
    if name not in (TORCHAO_8, TORCHAO_4):
        sys.modules["torchao"] = None  # type: ignore[assignment]  # transformers would import it
    start = time.perf_counter()
    try:
        side = load(Path(folder), name)
        loaded = time.perf_counter()
        side.set_threads(int(threads))
        start += time.perf_counter() - loaded
        side.run(Step(1))
    except (ImportError, NotImplementedError, RuntimeError) as error:
        print(json.dumps({"why": str(error).partition("\n")[0].partition(". ")[0].rstrip(".")}), flush=True)
        return
    print(json.dumps({"seconds": time.perf_counter() - start, **memory()}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        print(json.dumps(answer(side, json.loads(line))), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _serve(*sys.argv[1:])
