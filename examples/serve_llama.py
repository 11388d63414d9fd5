"""Serve a LLaMA with streaming tokens, from processes that share its weights and their casts.

The float32 weights are mapped into memory from their folder. What polycast makes of them for a recipe (`--recipe int4`;
by default int8) is saved once and mapped too, so that all processes share both. The model and its `generate()` are
those of transformers.

    pip install ".[serve]"
    python examples/serve_llama.py --weights FOLDER --processes 2
    curl -N localhost:8000/generate -H "Content-Type: application/json" -d '{"tokens": [1, 450, 7483]}'

Without a folder the weights are random. With `--try N` it answers N requests of its own, and ends.
"""

import argparse
import json
import multiprocessing
import os
import queue
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import polycast

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
}


class Request(BaseModel):
    """The tokens of a prompt, and the number to generate."""

    tokens: list[int]
    max_new_tokens: int = 16


class Tokens(BaseStreamer):
    """Hands tokens from the thread that generates them to the one that sends them."""

    def __init__(self) -> None:
        self._queue: queue.Queue[list[int] | None] = queue.Queue()
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Add tokens; the first are those of the prompt."""
        if self._prompt_seen:
            self._queue.put(value.tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Add no more tokens."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[int]:
        while (tokens := self._queue.get()) is not None:
            yield from tokens


class Server:
    """Generates tokens on threads, which share the casts and the prepacked weights of a model."""

    def __init__(self, folder: Path, recipe: str, threads: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        self.cache = load_cache(folder, recipe, self.model)
        self._region = polycast.autocast("cpu", recipe=recipe, cache=self.cache)
        self._pool = ThreadPoolExecutor(threads)

    def generate(self, request: Request) -> Iterator[str]:
        """Yield a line for each token."""
        tokens = Tokens()
        done = self._pool.submit(self._run, request, tokens)
        yield from (f"{token}\n" for token in tokens)
        done.result()

    def _run(self, request: Request, tokens: Tokens) -> None:
        started = time.perf_counter()
        prompt = torch.tensor([request.tokens])
        try:
            with torch.inference_mode(), self._region:
                output = self.model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens,
                    do_sample=False, streamer=tokens,
                )  # fmt: skip
        finally:
            tokens.end()
        count = output.shape[1] - prompt.shape[1]
        speed = count / (time.perf_counter() - started)
        made = self.cache.stats().misses
        report = f"process {os.getpid()}: {count} tokens, {speed:.1f} a second, {memory()}, {made} made here\n"
        print(report, end="", flush=True)  # in one piece: other threads print too


def cache_file(folder: Path, recipe: str) -> Path:
    """Return the file of what polycast makes of the weights."""
    return folder / f"polycast-{recipe}.safetensors"


def load_cache(folder: Path, recipe: str, model: torch.nn.Module) -> polycast.WeightCache:
    """Return the saved cache; if there is none, or it is of other weights or versions, make and save it."""
    path = cache_file(folder, recipe)
    try:
        return polycast.WeightCache.load(path, model)
    except (FileNotFoundError, ValueError) as error:
        print(f"making {path.name}: {error}", flush=True)
    cache = polycast.WeightCache()
    with torch.inference_mode(), polycast.autocast("cpu", recipe=recipe, cache=cache):
        model(torch.tensor([[0]]))
    cache.save(path, model)
    return cache


def memory() -> str:
    """Return the memory of this process: its own, and what it shares with the files that it maps."""
    smaps = Path("/proc/self/smaps_rollup")
    if not smaps.exists():
        return "memory unknown"
    sizes = {line.partition(":")[0]: line.split()[1] for line in smaps.read_text().splitlines()[1:]}
    own, resident = int(sizes["Anonymous"]) // 1024, int(sizes["Rss"]) // 1024
    return f"{own} MiB of its own, {resident - own} MiB of files"


def serve(folder: Path, recipe: str, threads: int, torch_threads: int, listener: socket.socket) -> None:
    """Answer requests until the process ends."""
    torch.set_num_threads(torch_threads)
    server, app = Server(folder, recipe, threads), FastAPI()

    @app.post("/generate")
    def generate(request: Request) -> StreamingResponse:
        return StreamingResponse(server.generate(request), media_type="text/plain")

    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def prepare(folder: Path, recipe: str, size: str) -> None:
    """Write random weights if there are none, and what polycast makes of the weights."""
    if not (folder / "config.json").exists():
        # No token ends the answers: with random weights, any may be next.
        LlamaForCausalLM(LlamaConfig(**SIZES[size], eos_token_id=None)).save_pretrained(folder)
    Server(folder, recipe, 1)


def ask(port: int, number: int) -> list[int]:
    """Return the answer to a request, which waits until a process accepts it."""
    content = json.dumps({"tokens": [1, number], "max_new_tokens": 8}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return [int(line) for line in answer]


def main() -> None:
    """Start the processes, and answer requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a folder, as save_pretrained writes it")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of random weights")
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="the requests that a process answers at once")
    parser.add_argument("--try", dest="tries", type=int, default=0, help="answer so many requests, and end")
    options = parser.parse_args()

    processes = multiprocessing.get_context("spawn")
    torch_threads = max(1, torch.get_num_threads() // options.processes)
    with tempfile.TemporaryDirectory() as made, socket.create_server(("127.0.0.1", options.port)) as listener:
        folder = options.weights or Path(made)
        # In a process of its own, so that its memory is returned.
        preparing = processes.Process(target=prepare, args=(folder, options.recipe, options.size))
        preparing.start()
        preparing.join()
        if preparing.exitcode != 0:
            raise SystemExit(preparing.exitcode)
        arguments = (folder, options.recipe, options.threads, torch_threads, listener)
        workers = [processes.Process(target=serve, args=arguments) for _ in range(options.processes)]
        for worker in workers:
            worker.start()
        port = listener.getsockname()[1]
        print(f"listening on port {port}", flush=True)
        try:
            if options.tries:
                with ThreadPoolExecutor(options.tries) as clients:
                    for answer in clients.map(ask, [port] * options.tries, range(options.tries)):
                        print("answer:", *answer, flush=True)
            else:
                threading.Event().wait()
        finally:
            for worker in workers:
                worker.terminate()
                worker.join()


if __name__ == "__main__":
    main()
