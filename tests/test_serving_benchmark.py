"""The part of the benchmark `serving` that asks servers: what it measures, and what it leaves out."""

import contextlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
STAND_IN = """
import http.server, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for number in range(int(sys.argv[2])):
            self.wfile.write(b"token\\n\\n")
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    pytest.importorskip("transformers")
    return pytest.importorskip("benchmarks.servers")


@pytest.fixture
def side(servers):
    """Return a function that makes the side of a server whose answers have a number of tokens."""

    def make(tokens=servers.TOKENS, code=STAND_IN, gguf=""):
        return servers.Side(
            lambda folder, port: ["-c", code, str(port), str(tokens)],
            "/",
            lambda prompt: {"prompt": prompt},
            lambda line: line == b"token\n",
            gguf,
        )

    return make


@pytest.mark.slow
def test_each_server_has_a_speed_and_a_wait_for_each_number_of_clients(servers, side, monkeypatch, tmp_path):
    monkeypatch.setattr(servers, "SIDES", {"a, int4": side(), "b": side(code="raise SystemExit('it has no model')")})
    found = servers.measure(tmp_path, quick=True)
    clients = [f"{count} client{'s' * (count > 1)}" for count in (1, 4, 8)]
    sides = ("a, int4", "b", "a, int4, first token", "b, first token")
    assert [each.what for each in found] == [f"{name}, {count}" for name in sides for count in clients]
    assert [each.unit for each in found] == [" tokens/s"] * 6 + [" ms"] * 6
    assert all(each.measured > 0 and not each.skipped for each in found if each.what.startswith("a"))
    assert {(each.measured, each.skipped) for each in found if each.what.startswith("b")} == {(None, "it has no model")}


@pytest.mark.slow
def test_an_answer_with_too_few_tokens_is_an_error(servers, side, tmp_path):
    refused = pytest.raises(RuntimeError, match="3 tokens with status 200")
    with servers.Server(side(tokens=3), tmp_path) as server, refused:
        server.wait()


def test_the_best_of_several_turns_counts_and_all_servers_get_the_same_prompts(servers, side, monkeypatch, tmp_path):
    asked = {"a": [], "b": []}

    class Server(contextlib.nullcontext):
        def __init__(self, side, folder):
            super().__init__(self)
            self.asked = asked["a" if side is servers.SIDES["a"] else "b"]

        def wait(self):
            pass

        def ask_together(self, first, clients):
            self.asked.append((first, clients))
            return float(first), float(first)

    monkeypatch.setattr(servers, "Server", Server)
    monkeypatch.setattr(servers, "SIDES", {"a": side(), "b": side()})
    found = {each.what: each.measured for each in servers.measure(tmp_path, quick=False)}
    firsts = [(1, 1), (2, 4), (6, 8), (14, 1), (15, 4), (19, 8), (27, 1), (28, 4), (32, 8), (40, 1), (41, 4), (45, 8)]
    assert asked == {"a": firsts, "b": firsts}
    assert [found[f"a, {count}"] for count in ("1 client", "4 clients", "8 clients")] == [40, 41, 45]
    assert [found[f"b, first token, {count}"] for count in ("1 client", "4 clients", "8 clients")] == [1000, 2000, 6000]


def test_without_llama_cpp_its_server_is_left_out_with_the_reason(servers, side, monkeypatch, tmp_path):
    monkeypatch.setattr(servers.gguf_files, "missing", lambda: "llama-cpp-python is not installed")
    monkeypatch.setattr(servers, "SIDES", {"a": side(gguf="Q4_0")})
    found = servers.measure(tmp_path, quick=True)
    assert {(each.measured, each.skipped) for each in found} == {(None, "llama-cpp-python is not installed")}


def test_a_prompt_begins_otherwise_than_those_before_it(servers):
    prompts = [servers._prompt(number) for number in range(200)]
    assert {len(prompt) for prompt in prompts} == {servers.PROMPT}
    assert all(len({prompt[0] for prompt in prompts[start : start + 16]}) == 16 for start in range(184))
    assert all(re.fullmatch("[ -~]+", prompt) for prompt in prompts)


@pytest.fixture
def folder(servers, tmp_path):
    """Return a folder with a tiny LLaMA for all servers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if servers.gguf_files.missing():
        pytest.skip(servers.gguf_files.missing())
    for name in ("fastapi", "sse_starlette", "starlette_context", "pydantic_settings"):
        pytest.importorskip(name, reason=f"{name} is in the extra 'llama-cpp'")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    servers.prepare(LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None)).eval(), tmp_path)
    return tmp_path


@pytest.mark.slow
def test_llama_cpp_reads_a_prompt_as_the_tokens_that_polycasts_server_gets(servers, folder):
    import llama_cpp

    servers.gguf_files._be_quiet()
    model = llama_cpp.Llama(str(folder / "Q4_0.gguf"), vocab_only=True, verbose=False)
    for number in range(95):
        prompt = servers._prompt(number)
        assert model.tokenize(prompt.encode(), add_bos=True) == servers.gguf_files.tokens_of(prompt)


@pytest.mark.slow
def test_both_servers_answer_the_clients(servers, folder, monkeypatch):
    monkeypatch.setattr(servers, "SIDES", {name: servers.SIDES[name] for name in list(servers.SIDES)[:2]})
    found = servers.measure(folder, quick=True)
    assert [each.what for each in found[:6:3]] == ["polycast, int4, 1 client", "llama-cpp-python, Q4_0, 1 client"]
    assert [each.skipped for each in found] == [""] * 12
    assert all(each.measured > 0 for each in found)
