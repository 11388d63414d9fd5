"""The benchmark `llama-cpp`: its plan without llama.cpp, and that llama.cpp computes the same model as torch."""

import itertools
import json
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(ROOT)
    pytest.importorskip("transformers")
    return lambda name: pytest.importorskip(f"benchmarks.{name}")


@pytest.fixture
def tiny():
    """Return a LLaMA of two layers, with fewer heads for keys than for queries."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    return model


@pytest.fixture
def written(module, tiny, tmp_path):
    """Return a folder with the tiny model for torch and for llama.cpp, in float32."""
    files = module("gguf_files")
    if files.missing():
        pytest.skip(files.missing())
    tiny.save_pretrained(tmp_path)
    files.write(tiny, tmp_path / "F32.gguf")
    return tmp_path


def test_without_llama_cpp_each_row_says_so_and_has_its_bound(module, monkeypatch):
    benchmark, sides = module("llama"), module("llama_sides")
    monkeypatch.setattr(benchmark.gguf_files, "missing", lambda: "llama-cpp-python is not installed")
    results = benchmark.LlamaCpp((1, 2)).run(quick=True)
    assert {(each.measured, each.skipped) for each in results} == {(None, "llama-cpp-python is not installed")}
    assert {each.threads for each in results} == {1, 2}
    bounds = {(each.what, each.against): each.at_most for each in results}
    named = {
        f"{step}, {side}" for step in benchmark.STEPS for wave in benchmark.WAVES for side in wave if side != "float32"
    }
    assert {what for what, against in bounds if against == "float32"} == named
    assert bounds["1 token, int8", "Q8_0"] == 0.95
    assert bounds["1 token, int4, groups of 128", "Q4_0"] == 0.93
    assert bounds["1 token after 2,048, fastest", "BF16"] == 1.0
    assert bounds["1 token after 512, 8 sequences, int8", "Q8_0"] == 0.6
    assert {step.sequences for step in benchmark.STEPS} == {1, 2, 4, 8}
    waves = [*benchmark.WAVES, benchmark.WITH_COMPILED]
    assert {*itertools.chain(*waves)} == {*sides.WAYS, *module("gguf_files").FORMATS}


def test_a_benchmark_that_takes_threads_runs_once_with_all_of_them(module, monkeypatch):
    catalog, main = module("catalog"), module("__main__")
    commands = []

    def run(command, *, env, **_):
        commands.append((command[3:], env["OMP_NUM_THREADS"]))
        return subprocess.CompletedProcess(command, 0, json.dumps({"results": [], "accuracy": []}))

    monkeypatch.setattr(catalog.subprocess, "run", run)
    monkeypatch.setattr(catalog, "all_of_them", lambda: (2,))
    list(main.measure(["llama-cpp", "int4"], [1, 2], quick=True))
    assert commands == [
        (["llama-cpp", "quick", "1", "2"], "2"),
        (["int4", "quick", "1"], "1"),
        (["int4", "quick", "2"], "2"),
    ]
    assert list(main._turns(catalog.BENCHMARKS["llama-cpp"], [3])) == []
    assert catalog.BENCHMARKS["llama-cpp"].make(1, 2).threads == (1, 2)


def test_slow_sides_are_timed_twice_and_the_others_in_each_round(module):
    """A side is not slow for its first step, which may read its file from disk."""
    benchmark = module("llama")
    asked = []

    class Fake:
        def __init__(self, name, *seconds):
            self.name, self.seconds = name, list(seconds)

        def ask(self, request):
            asked.append((self.name, json.loads(request)["calls"]))
            return self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]

    sides = {"float32": [0.1], "int8": [0.9, 0.02], "slow": [0.5, 0.4]}
    workers = {name: Fake(name, *seconds) for name, seconds in sides.items()}
    plan, taken = benchmark._raced(workers, benchmark.Step(1), 2, quick=False)
    assert plan.once == {"slow": 0.4}
    assert taken == [{"float32": 0.1, "int8": 0.02}] * 2
    assert asked[9:] == [("float32", 2), ("int8", 10), ("int8", 10), ("float32", 2)]


def test_a_side_of_torch_forgets_the_tokens_of_a_step(module, tiny, tmp_path):
    sides = module("llama_sides")
    tiny.save_pretrained(tmp_path)
    side = sides.Torch(tmp_path, "int8")
    step = sides.Step(2, 16, 3)
    for _ in range(2):
        side.run(step)
        assert side._context(step).get_seq_length() == 16
    assert side._context(step).layers[0].keys.shape == (3, 2, 16, 32)
    expected = tiny(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert torch.allclose(sides.Torch(tmp_path, "float32").logits([5, 6, 7]), expected, atol=1e-5)


def test_a_side_that_cannot_run_here_says_why(module, tiny, tmp_path, capsys, monkeypatch):
    sides = module("llama_sides")

    def load(*_):
        raise NotImplementedError("It does not support device 'cpu' yet. See elsewhere.\nTraceback")

    monkeypatch.setattr(sides, "load", load)
    monkeypatch.setitem(sides.sys.modules, "torchao", None)
    sides._serve(str(tmp_path), "torchao, int4", "1")
    assert json.loads(capsys.readouterr().out) == {"why": "It does not support device 'cpu' yet"}


@pytest.mark.slow
def test_llama_cpp_computes_torchs_logits(module, written):
    benchmark, sides = module("llama"), module("llama_sides")
    benchmark.check(written)
    tokens = sides.ids(24)
    assert torch.allclose(*(sides.load(written, name).logits(tokens) for name in ("F32", "float32")), atol=1e-5)


@pytest.mark.slow
def test_the_check_finds_a_model_whose_queries_are_rotated_otherwise(module, tiny, written, monkeypatch):
    benchmark, files = module("llama"), module("gguf_files")
    monkeypatch.setattr(files, "permuted", lambda weight, _: weight)
    files.write(tiny, written / "F32.gguf")
    with pytest.raises(RuntimeError, match=r"differ from torch's by \d.*nothing can be compared"):
        benchmark.check(written)


@pytest.mark.slow
def test_sequences_of_llama_cpp_continue_a_saved_context(module, tiny, written):
    files = module("gguf_files")
    tokens, cells = list(range(3, 23)), {1: 64, 4: 64}
    expected = tiny(torch.tensor([tokens])).logits[0, -1]
    for most in cells:
        first = files.Model(written / "F32.gguf", cells, exact=True)
        first.decode(tokens, most=most)
        first.save(written / "state", most)
        second = files.Model(written / "F32.gguf", cells, exact=True)
        second.load(written / "state", most)
        for _ in range(2):
            second.decode(tokens[-1:], 19, most)
            assert torch.allclose(second.logits(most), expected, atol=1e-5)


@pytest.mark.slow
def test_formats_of_llama_cpp_are_near_float32(module, tiny, written):
    files = module("gguf_files")
    tokens = list(range(3, 23))
    expected = tiny(torch.tensor([tokens])).logits[0, -1]
    for name, at_most in {"F16": 0.01, "BF16": 0.03, "Q8_0": 0.1}.items():
        files.quantize(written / "F32.gguf", written / f"{name}.gguf", name)
        model = files.Model(written / f"{name}.gguf", {1: 64})
        model.decode(tokens)
        assert (model.logits() - expected).norm() < at_most * expected.norm(), name
    with pytest.raises(RuntimeError, match="did not write"):
        files.quantize(written / "absent.gguf", written / "other.gguf", "F16")
