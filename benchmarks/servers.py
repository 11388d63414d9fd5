"""A LLaMA behind HTTP: polycast's example server and llama-cpp-python's, each in a process, and clients that are alike.

polycast's server decodes all requests in one batch; llama-cpp-python's answers them in turn.
"""

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch

from . import gguf_files
from .timing import Result

PROMPT, TOKENS = 16, 32
CLIENTS = (1, 4, 8)
_TURNS = 4
_EXAMPLE = Path(__file__).parent.parent / "examples" / "serve_llama.py"


@dataclass(frozen=True)
class Side:
    """A server, and how it is asked.

    Attributes:
        arguments: returns Python's arguments that start it, from the folder of the model and the port.
        path: the path of requests.
        request: returns the request for an answer of `TOKENS` tokens to a prompt.
        is_token: whether a line of the answer is a token.
        gguf: the format of the file of llama.cpp that it reads; empty if it reads none.
    """

    arguments: Callable[[Path, int], list[str]]
    path: str
    request: Callable[[str], dict[str, Any]]
    is_token: Callable[[bytes], bool]
    gguf: str = ""


def _polycast(recipe: str) -> Side:
    return Side(
        lambda folder, port: [str(_EXAMPLE), "--weights", str(folder), "--recipe", recipe, "--port", str(port)],
        "/generate",
        lambda prompt: {"tokens": gguf_files.tokens_of(prompt), "max_new_tokens": TOKENS},
        lambda line: bool(line.strip()),
    )


def _llama_cpp(name: str) -> Side:
    def arguments(folder: Path, port: int) -> list[str]:
        threads = str(torch.get_num_threads())
        options = {
            "model": str(folder / f"{name}.gguf"),
            "host": "127.0.0.1",
            "port": str(port),
            "n_threads": threads,  # the default is half of the processors
            "n_threads_batch": threads,
            "logits_all": "false",  # the default computes logits of the whole prompt
            "interrupt_requests": "false",  # the default ends an answer when another request arrives
        }
        return ["-m", "llama_cpp.server", *(word for key, value in options.items() for word in (f"--{key}", value))]

    def is_token(line: bytes) -> bool:
        _, data, event = line.partition(b"data: {")
        return bool(data) and json.loads(b"{" + event)["choices"][0]["finish_reason"] is None

    return Side(
        arguments,
        "/v1/completions",
        lambda prompt: {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True},
        is_token,
        gguf=name,
    )


SIDES: Mapping[str, Side] = {
    "polycast, int4": _polycast("int4"),
    "llama-cpp-python, Q4_0": _llama_cpp("Q4_0"),
    "polycast, int8": _polycast("int8"),
    "llama-cpp-python, Q8_0": _llama_cpp("Q8_0"),
}


class Server:
    """A server in a process of its own, which ends with the block."""

    def __init__(self, side: Side, folder: Path) -> None:
        self._side, self._complaints = side, tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [sys.executable, *side.arguments(folder, self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._complaints)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._complaints.close()

    def wait(self) -> None:
        """Wait for an answer.

        Raises:
            RuntimeError: the process ended.
        """
        while True:
            try:
                self.ask(0)
            except ConnectionError:
                if self._process.poll() is not None:
                    self._complaints.seek(0)
                    lines = self._complaints.read().decode(errors="replace").strip().splitlines()
                    raise RuntimeError(lines[-1] if lines else f"status {self._process.returncode}") from None
                time.sleep(0.1)
            else:
                return

    def ask(self, number: int) -> float:
        """Return the seconds to the first token of the answer to a prompt, after the answer.

        Raises:
            RuntimeError: the answer has another number of tokens than `TOKENS`.
        """
        start = time.perf_counter()
        with closing(HTTPConnection("127.0.0.1", self._port)) as connection:
            content = json.dumps(self._side.request(_prompt(number)))
            connection.request("POST", self._side.path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            times = [time.perf_counter() for line in answer if self._side.is_token(line)]
        if len(times) != TOKENS:
            raise RuntimeError(f"{self._side.path} answered {len(times)} tokens with status {answer.status}.")
        return times[0] - start

    def ask_together(self, first: int, clients: int) -> tuple[float, float]:
        """Return the tokens a second of all clients together, prompts included, and the mean seconds to a first token.

        Args:
            first: the number of the first client's prompt.
            clients: the number of clients, whose requests arrive together.
        """
        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            waits = list(threads.map(self.ask, range(first, first + clients)))
        return clients * TOKENS / (time.perf_counter() - start), statistics.mean(waits)


def _prompt(number: int) -> str:
    """Return a prompt that begins otherwise than those before it: a server may keep what it computed of a beginning."""
    return chr(ord("!") + number % 90) + "abcdefghijklmnopqrstuvwxyz"[: PROMPT - 1]


def prepare(model: Any, folder: Path) -> None:
    """Write a float32 LLaMA for all servers, in bfloat16 for polycast's; without llama.cpp, only for that one."""
    if not gguf_files.missing():
        gguf_files.write(model, folder / "F32.gguf")
        for name in (side.gguf for side in SIDES.values() if side.gguf):
            gguf_files.quantize(folder / "F32.gguf", folder / f"{name}.gguf", name)
        (folder / "F32.gguf").unlink()
    model.bfloat16().save_pretrained(folder)


def measure(folder: Path, quick: bool) -> list[Result]:
    """Return the tokens a second and the wait for a first token of each server, from the best of several turns."""
    speeds: dict[tuple[str, int], list[float]] = {}
    waits: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        left_out: dict[str, str] = {}
        for name, side in SIDES.items():
            if side.gguf and (why := gguf_files.missing()):
                left_out[name] = why
                continue
            servers[name] = stack.enter_context(Server(side, folder))
            try:
                servers[name].wait()
            except RuntimeError as error:
                left_out[name] = str(error)
                del servers[name]
        first, order = 1, list(servers)
        for _ in range(1 if quick else _TURNS):
            for clients in CLIENTS:
                for name in order:
                    speed, wait = servers[name].ask_together(first, clients)
                    speeds.setdefault((name, clients), []).append(speed)
                    waits.setdefault((name, clients), []).append(1000 * wait)
                first += clients
            order.reverse()
    return [
        Result(
            f"{name}{what}, {clients} client{'s' * (clients > 1)}",
            "-",
            best(found[name, clients]) if name not in left_out else None,
            None,
            unit,
            skipped=left_out.get(name, ""),
        )
        for what, found, best, unit in (("", speeds, max, " tokens/s"), (", first token", waits, min, " ms"))
        for name in SIDES
        for clients in CLIENTS
    ]
