"""Serve a LLaMA on a CPU: text in, streaming text out, from processes that share its weights.

The weights are mapped from their folder. Those that are prepacked for a recipe are saved there once, or in the user's
cache if the folder is read-only, and mapped too. All requests are decoded in one batch, which new ones join: this is
the continuous batching of transformers.

    pip install ".[serve]"
    python examples/serve_llama.py --weights FOLDER
    curl -N localhost:8000/generate -H "Content-Type: application/json" -d '{"text": "The capital of France is"}'

`--compare FILE` prints perplexity, speed and memory on a text, in float32 and with the recipe. Without a folder the
weights are random, and requests have `"tokens"` in place of `"text"`. `--try N` answers N requests, and exits.
"""

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM

import polycast

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
}
KEPT = ContinuousBatchingConfig(num_blocks=64, page_size=64, max_batch_tokens=256, use_cuda_graph=False)
"""Keys and values of num_blocks * page_size tokens are kept, of all requests together."""
ENDED = "a process of the server ended: see its error above"


class Request(BaseModel):
    """A prompt, as text or as tokens, and the number of tokens to generate."""

    text: str | None = None
    tokens: list[int] = []
    max_new_tokens: int = 64


class Server:
    """Generates tokens for all requests in one batch."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.model, self.tokenizer = load(folder, "auto")
        self.cache = load_cache(folder, recipe, self.model)
        # Decorated, so that the thread that decodes runs it in the region.
        self.model.forward = polycast.autocast("cpu", recipe=recipe, cache=self.cache)(self.model.forward)
        config = self.model.generation_config
        config.update(do_sample=False, eos_token_id=-1 if config.eos_token_id is None else config.eos_token_id)
        self.manager = self.model.init_continuous_batching(config, KEPT)
        with torch.inference_mode():
            self.manager.start()

    def tokens_of(self, request: Request) -> list[int]:
        """Return the tokens of a prompt."""
        if request.text is not None and self.tokenizer is None:
            raise HTTPException(400, "the folder has no tokenizer: send tokens")
        tokens = request.tokens if request.text is None else self.tokenizer(request.text)["input_ids"]
        if not all(0 <= token < self.model.config.vocab_size for token in tokens):
            raise HTTPException(400, f"tokens must be from 0 to {self.model.config.vocab_size - 1}")
        if request.max_new_tokens < 1:
            raise HTTPException(400, f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        most = min(KEPT.num_blocks * KEPT.page_size, self.model.config.max_position_embeddings)
        if not 0 < len(tokens) <= most - request.max_new_tokens:
            sizes = f"the prompt has {len(tokens)} tokens and the answer {request.max_new_tokens}"
            raise HTTPException(400, f"{sizes}: send at least one, and at most {most} in all")
        return tokens

    async def generate(self, request: Request, prompt: list[int]) -> AsyncIterator[str]:
        """Yield the text that follows a prompt of text, or a line for each token."""
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        name, sent, started, output = str(uuid.uuid4()), "", time.perf_counter(), None
        self.manager.register_result_handler(name, outputs.put_nowait)
        if self.manager.add_request(prompt, name, request.max_new_tokens, streaming=True) is None:
            raise RuntimeError("the thread that decodes has ended: see its error above")
        try:
            while output is None or not output.is_finished():
                output = await outputs.get()
                if output.error:
                    raise RuntimeError(output.error)
                tokens = output.generated_tokens
                if request.text is None:
                    text = "".join(f"{token}\n" for token in tokens)
                else:
                    text = self.tokenizer.decode(
                        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
                    ).rstrip("\N{REPLACEMENT CHARACTER}")  # one or more stand for a character that is not complete
                yield text[len(sent) :]
                sent = text
        finally:
            self.manager.cancel_request(name)  # if the client has gone
        speed, made = len(tokens) / (time.perf_counter() - started), self.cache.stats().misses
        print(
            f"process {os.getpid()}: {len(tokens)} tokens, {speed:.1f} a second, {memory()}, {made} made here",
            flush=True,
        )


def load(folder: Path, dtype: Any) -> tuple[Any, Any]:
    """Return the model, whose weights are mapped if they have the dtype, and the tokenizer; None if there is none."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).requires_grad_(False)
    has_tokenizer = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    return model, AutoTokenizer.from_pretrained(folder) if has_tokenizer else None


def load_cache(folder: Path, recipe: str, model: torch.nn.Module) -> polycast.WeightCache:
    """Return the saved cache; if there is none, or it is of other weights or versions, make and save it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polycast" / "packed"
    folders, name = [folder, caches.joinpath(*folder.resolve().parts[1:])], f"polycast-{recipe}.safetensors"
    for path in (each / name for each in folders):
        if path.exists():
            try:
                return polycast.WeightCache.load(path, model)
            except ValueError as error:
                print(error, flush=True)
    path = folders[0 if os.access(folder, os.W_OK) else 1] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"making {path}, once", flush=True)
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


def compare(folder: Path, recipe: str, text: str) -> None:
    """Print the perplexity of a text, the tokens a second that follow its start, and the memory."""
    model, tokenizer = load(folder, torch.float32 if recipe == "float32" else "auto")
    if tokenizer is None:
        raise SystemExit(f"{folder} has no tokenizer")
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][:, : model.config.max_position_embeddings]
    if recipe != "float32":
        region = polycast.autocast("cpu", recipe=recipe, cache=load_cache(folder, recipe, model))
        model.forward = region(model.forward)
    with torch.inference_mode():
        perplexity = math.exp(model(tokens, labels=tokens).loss)
        prompt, count, times = tokens[:, :16], 32, []
        for _ in range(3):
            started = time.perf_counter()
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count)
            times.append(time.perf_counter() - started)
    print(f"{recipe}: perplexity {perplexity:.2f}, {count / min(times):.1f} tokens a second, {memory()}", flush=True)


def serve(folder: Path, recipe: str, torch_threads: int, listener: socket.socket, ready: Connection) -> None:
    """Load the model, say so, and answer requests until the process is terminated."""
    # uvicorn stops at these signals, and raises them again: that must not end the process before libraries clean up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process terminates this one
    torch.set_num_threads(torch_threads)
    server, app = Server(folder, recipe), FastAPI()

    @app.post("/generate")
    async def generate(request: Request) -> StreamingResponse:
        return StreamingResponse(server.generate(request, server.tokens_of(request)), media_type="text/plain")

    ready.send(None)
    try:
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    finally:
        server.manager.stop(hard_stop=True)


def prepare(folder: Path, recipe: str, size: str | None) -> None:
    """Save the prepacked weights, after random weights if a size is given."""
    if size is not None:
        # No token ends the answers: with random weights, any may be next.
        LlamaForCausalLM(LlamaConfig(**SIZES[size], eos_token_id=None)).save_pretrained(folder)
    load_cache(folder, recipe, load(folder, "auto")[0])


@contextlib.contextmanager
def started(processes: Any, count: int, arguments: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Start processes that serve, and yield them when all have loaded the model. They end with the block."""
    workers, loaded = [], []
    try:
        for _ in range(count):
            ready, told = processes.Pipe(duplex=False)
            workers.append(processes.Process(target=serve, args=(*arguments, told), daemon=True))
            workers[-1].start()
            told.close()  # so that the end of the process ends the pipe
            loaded.append(ready)
        try:
            for ready in loaded:
                ready.recv()
        except EOFError:
            raise SystemExit(ENDED) from None
        yield workers
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def ask(port: int, number: int) -> str:
    """Return the answer to a request."""
    content = json.dumps({"tokens": [1, number], "max_new_tokens": 8}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return " ".join(answer.read().decode().split())


def main() -> None:
    """Start the processes, and answer requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="the folder of a model, as save_pretrained writes it")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of random weights")
    parser.add_argument("--recipe", default="int4")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="compare float32 and the recipe on a text, and exit"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--try", dest="tries", type=int, default=0, metavar="N", help="answer N requests, and exit")
    options = parser.parse_args()
    if options.weights and not (options.weights / "config.json").exists():
        parser.error(f"--weights {options.weights}: expected a folder with config.json, as save_pretrained writes it")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which ends the other processes, that are daemons
    processes = multiprocessing.get_context("spawn")
    torch_threads = max(1, torch.get_num_threads() // options.processes)

    def run(*call: Any) -> None:  # in a process of its own, so that its memory is returned
        process = processes.Process(target=call[0], args=call[1:], daemon=True)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(process.exitcode)

    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory() as made,
        socket.create_server(("127.0.0.1", options.port)) as listener,
    ):
        folder = options.weights or Path(made)
        run(prepare, folder, options.recipe, None if options.weights else options.size)
        if options.compare:
            for way in ("float32", options.recipe):
                run(compare, folder, way, options.compare.read_text(encoding="utf-8"))
            return
        arguments = (folder, options.recipe, torch_threads, listener)
        with started(processes, options.processes, arguments) as workers:
            port = listener.getsockname()[1]
            print(f"listening on port {port}", flush=True)
            if options.tries:
                with ThreadPoolExecutor(options.tries) as clients:
                    for answer in clients.map(ask, [port] * options.tries, range(options.tries)):
                        print("answer:", answer, flush=True)
            else:
                multiprocessing.connection.wait([worker.sentinel for worker in workers])
                raise SystemExit(ENDED)


if __name__ == "__main__":
    main()
