"""The server of a LLaMA: text in, text out, from processes that share what is made of the weights."""

import asyncio
import contextlib
import functools
import importlib.util
import json
import operator
import os
import pydoc
import re
import shutil
import subprocess
import sys
import types
import urllib.error
import urllib.request
from pathlib import Path
from unittest import mock

import pytest
import torch

import polycast

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "serve_llama.py"
PROMPT = "Each module has a docstring: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a LLaMA with random weights, and a tokenizer that was trained on a module of Python."""
    for module in ("fastapi", "uvicorn", "transformers"):
        pytest.importorskip(module, reason=f"{module} is in the extra 'serve'")
    if not polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int4()):
        pytest.skip("the processor or the compiler offers no int4 here")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([Path(pydoc.__file__).read_text(encoding="utf-8")], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None)).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def example(folder):
    spec = importlib.util.spec_from_file_location("serve_llama", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def started(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(EXAMPLE), "--port", "0", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def post(port, **request):
    content, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/generate", content, headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        return answer.read().decode()


def test_text_is_answered_with_the_text_of_the_tokens_and_a_termination_leaves_nothing(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with started("--weights", folder) as process:
        lines = []
        while not lines or not lines[-1].startswith("listening on port "):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        port = int(lines[-1].split()[-1])
        tokens = post(port, tokens=tokenizer(PROMPT)["input_ids"], max_new_tokens=8).split()
        assert len(tokens) == 8
        text = post(port, text=PROMPT, max_new_tokens=8)
        assert text == tokenizer.decode(list(map(int, tokens))).removesuffix("\N{REPLACEMENT CHARACTER}")
        lengths = [{"tokens": [1], "max_new_tokens": count} for count in (10_000, 0, -1)]
        for wrong in ({"text": ""}, {}, *lengths, {"tokens": [512]}, {"tokens": [-1]}):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(port, **wrong)
        process.terminate()
        printed, complaints = process.communicate(timeout=100)
    assert [line for line in lines if line.startswith("making")] == [
        f"making {folder}/polycast-int4.safetensors, once\n"
    ]
    assert "Errno" not in "".join(lines) + printed
    assert not re.search("leaked|Traceback", complaints)


def output(*arguments):
    """Run the example to its end; return what it prints, and its complaints."""
    with started(*arguments) as process:
        printed, complaints = process.communicate(timeout=300)
    assert process.returncode == 0, complaints
    return printed, complaints


def test_processes_serve_tokens_from_one_saved_cache():
    printed, complaints = output("--processes", "2", "--try", "4")
    printed = printed.splitlines()
    answers = [line for line in printed if line.startswith("answer:")]
    assert [len(re.findall(r"\d+", answer)) for answer in answers] == [8] * 4
    assert sum(line.startswith("making ") for line in printed) == 1
    served = [line for line in printed if line.startswith("process ")]
    own = r"process \d+: 8 tokens, [\d.]+ a second, (.* of its own, .*|memory unknown), 0 made here"
    assert [bool(re.fullmatch(own, line)) for line in served] == [True] * 4
    assert "leaked" not in complaints


def test_a_recipe_is_compared_with_float32_on_a_text(folder, tmp_path):
    (tmp_path / "text").write_text(PROMPT * 20, encoding="utf-8")
    printed, _ = output("--weights", folder, "--compare", tmp_path / "text")
    found = re.findall(r"^(\w+): perplexity ([\d.]+), [\d.]+ tokens a second, ", printed, re.MULTILINE)
    (first, exact), (second, low) = found
    assert (first, second) == ("float32", "int4")
    assert abs(float(low) / float(exact) - 1) < 0.1


def test_without_a_model_in_the_folder_it_says_what_is_expected(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve_llama.py", "--weights", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert f"--weights {tmp_path}: expected a folder with config.json, as save_pretrained" in capsys.readouterr().err


def test_beside_a_read_only_folder_the_packed_weights_are_in_the_users_cache(
    example, folder, tmp_path, monkeypatch, capsys
):
    copy = shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("polycast-*"))
    before = sorted(copy.iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (copy, os.W_OK))
    model, _ = example.load(copy, "auto")
    example.load_cache(copy, "int4", model)
    path = (tmp_path / "caches/polycast/packed").joinpath(*copy.parts[1:]) / "polycast-int4.safetensors"
    assert capsys.readouterr().out == f"making {path}, once\n"
    assert example.load_cache(copy, "int4", model).stats().packings > 0
    assert (capsys.readouterr().out, sorted(copy.iterdir())) == ("", before)


class Processes:
    """A context of multiprocessing whose processes do nothing, and that keeps the order of events."""

    def __init__(self, *, ends_early):
        self.events, self.ends_early = [], ends_early

    def Pipe(self, duplex):
        return self, self

    def Process(self, **_):
        return self

    def recv(self):
        self.events.append("ready")
        if self.ends_early:
            raise EOFError

    def start(self):
        self.events.append("started")

    def terminate(self):
        self.events.append("terminated")

    def close(self):
        pass

    def join(self):
        pass


@pytest.mark.parametrize(
    ("ends_early", "events"), [(False, ["ready", "ready", "listening"]), (True, ["ready"])], ids=["ready", "ends early"]
)
def test_the_server_listens_when_all_processes_are_ready_and_ends_with_one_of_them(example, ends_early, events):
    processes = Processes(ends_early=ends_early)
    outcome = pytest.raises(SystemExit, match="a process of the server ended")
    with outcome if ends_early else contextlib.nullcontext(), example.started(processes, 2, ()):
        processes.events.append("listening")
    assert processes.events == ["started", "started", *events, "terminated", "terminated"]


def test_a_character_of_several_tokens_is_sent_when_it_is_complete(example):
    from tokenizers import decoders

    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # that of LLaMA 2
    tokens = ["a", "<0xE2>", "<0x82>", "<0xAC>", "b"]

    def register_result_handler(name, put):
        for count in range(1, len(tokens) + 1):
            finished = functools.partial(operator.eq, count, len(tokens))
            put(types.SimpleNamespace(error=None, generated_tokens=tokens[:count], is_finished=finished))

    server = object.__new__(example.Server)
    server.manager, server.cache = mock.Mock(register_result_handler=register_result_handler), polycast.WeightCache()
    server.tokenizer = types.SimpleNamespace(decode=lambda tokens, **options: decoder.decode(tokens))

    async def answer():
        return [text async for text in server.generate(example.Request(text=""), [])]

    assert "".join(asyncio.run(answer())) == "a\N{EURO SIGN}b"
