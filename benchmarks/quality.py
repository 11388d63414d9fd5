"""Measure how near a quantized language model comes to float32, by bits: polycast's formats and llama.cpp's.

A small LLaMA is trained in the run. The same weights, with outliers planted in the activations, give a second model,
and a published BERT a third, which llama.cpp does not run: its formats are emulated there, by weights that ggml has
quantized and float32 activations. All text is held out from training and calibration.
"""

import copy
import ctypes
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

import polycast

from . import gguf_files
from .accuracy import CHECKPOINT_NAME, Checkpoint, load_checkpoint
from .scores import Scores

_SEED, _WINDOW, _BATCH, _STEPS, _QUICK_STEPS = 0, 64, 16, 400, 40
_WORDS = 2048
_CHANNELS, _LARGER = [3, 41, 77], 50
Logits = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model, what it is measured on, and what it is calibrated on.

    Attributes:
        head: the name of the output layer.
        logits: computes logits [tokens, words] of held-out text.
        targets: the tokens that they predict, [tokens].
        batches: for calibration.
        windows: the text, [windows, tokens], if it is read from the left.
    """

    what: str
    model: nn.Module
    head: str
    logits: Logits
    targets: torch.Tensor
    batches: Sequence[torch.Tensor]
    windows: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))


def _words() -> torch.Tensor:
    """Return the topics of pydoc, which come with Python, as numbers of words; rare ones are 0."""
    found = re.findall(r"\w+|[^\w\s]|\n", "\n".join(topics[name] for name in sorted(topics)))
    numbers = {word: number for number, (word, _) in enumerate(Counter(found).most_common(_WORDS - 1), 1)}
    return torch.tensor([numbers.get(word, 0) for word in found])


def _trained(text: torch.Tensor, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_WINDOW,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for _ in range(steps):
        tokens = text[torch.randint(len(text) - _WINDOW, (_BATCH, 1)) + torch.arange(_WINDOW)]
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)


def _with_outliers(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the same function with channels of the inputs of matmuls that are larger, as in large models."""
    planted = copy.deepcopy(model)
    pairs: list[tuple[Any, list[Any]]] = [(planted.model.norm, [planted.lm_head])]
    for layer in planted.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        pairs.append((layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]))
        pairs.append((layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
    for norm, layers in pairs:
        norm.weight[_CHANNELS] *= _LARGER
        for each in layers:
            each.weight[:, _CHANNELS] /= _LARGER
    return planted


def _language_models(steps: int, windows: int) -> Iterator[Subject]:
    text = _words()
    rest = len(text) * 9 // 10
    model = _trained(text[:rest], steps)
    held_out = text[rest:].unfold(0, _WINDOW, _WINDOW)[:windows]
    batches = list(text[:rest].unfold(0, _WINDOW, rest // 128)[:128].split(8))

    def logits(model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(held_out).logits[:, :-1].float().flatten(0, 1)
        return found

    targets = held_out[:, 1:].flatten()
    yield Subject("a LLaMA of 4.2 million weights", model, "lm_head", logits, targets, batches, held_out)
    planted = _with_outliers(model)
    yield Subject(f"with three channels times {_LARGER}", planted, "lm_head", logits, targets, batches, held_out)


def _masked_model(checkpoint: Checkpoint) -> Subject:
    """Return a model of masked residues, measured on the last sequence, calibrated on variants of the others."""
    *others, (measured, whole) = checkpoint.masked()
    places = torch.arange(1, len(whole) - 1)

    def logits(model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(measured).logits[places - 1, places].float()
        return found

    batches = [_mutated(other, checkpoint.tokens) for _, other in others for _ in range(8)]
    model, head = checkpoint.model.eval().requires_grad_(False), "cls.predictions.decoder"
    return Subject(CHECKPOINT_NAME, model, head, logits, whole[places], batches)


def _mutated(sequence: torch.Tensor, tokens: Mapping[str, int]) -> torch.Tensor:
    """Return variants: half of the residues are random, and a tenth is masked. Two sequences are too little data."""
    residues = torch.tensor([tokens[residue] for residue in "ACDEFGHIKLMNPQRSTVWY"])
    variants = sequence.repeat(16, 1)
    inner = variants[:, 1:-1]
    inner[:] = torch.where(torch.rand(inner.shape) < 0.5, residues[torch.randint(len(residues), inner.shape)], inner)
    inner[torch.rand(inner.shape) < 0.1] = tokens["[MASK]"]
    return variants


Measured = Iterator[tuple[str, torch.Tensor, float]]
"""Formats with the logits that they give, and the bits for each weight in linear layers."""


def _of_polycast(subject: Subject) -> Measured:
    def measured(name: str, recipe: Any, of_head: Any = None) -> tuple[str, torch.Tensor, float]:
        cache = polycast.WeightCache()
        rules = polycast.Policy(modules={subject.head: of_head} if of_head else {})
        region = polycast.autocast("cpu", recipe=recipe, cache=cache)
        with torch.no_grad(), polycast.apply_policy(subject.model, rules), region:
            logits = subject.logits(subject.model)
        weights = sum(layer.weight.numel() for layer in _linear_layers(subject.model))
        return name, logits, 8 * cache.stats().packed_bytes / weights or 16.0

    yield measured("bfloat16", "none")
    int8 = polycast.Int8(min_size=0)
    yield measured("int8", int8)
    calibrated_int8 = int8.with_options(calibration=polycast.calibrate(subject.model, subject.batches, int8))
    yield measured("int8, calibrated", calibrated_int8)
    for group in (32, 64, 128):
        name, recipe = f"int4, groups of {group}", polycast.Int4(group, min_size=0)
        calibration = polycast.calibrate(subject.model, subject.batches, recipe)
        factors_only = polycast.Calibration(tuple(replace(each, levels=()) for each in calibration.weights))
        calibrated = recipe.with_options(calibration=calibration)
        yield measured(name, recipe)
        yield measured(f"{name}, with factors only", recipe.with_options(calibration=factors_only))
        yield measured(f"{name}, calibrated", calibrated)
        if group == 32:
            yield measured(f"{name}, output layer in int8", recipe, int8)
            yield measured(f"{name}, calibrated, output layer in int8", calibrated, calibrated_int8)


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _of_llama_cpp(subject: Subject, folder: Path) -> Measured:
    """Yield what llama.cpp computes, first in float32."""
    import gguf

    for name in ("float32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q4_K_M", "IQ4_XS"):
        path = folder / f"{name}.gguf"
        if name == "float32":
            gguf_files.write(subject.model, path)
        else:
            gguf_files.quantize(folder / "float32.gguf", path, name)
        model = gguf_files.Model(path, {1: _WINDOW}, exact=True)
        logits = []
        for window in subject.windows.tolist():
            for place, token in enumerate(window[:-1]):
                model.decode([token], place)
                logits.append(model.logits())
        matrices = [
            each for each in gguf.GGUFReader(path).tensors if each.name != "token_embd.weight" and len(each.shape) == 2
        ]
        bits = 8 * sum(each.n_bytes for each in matrices) / sum(each.n_elements for each in matrices)
        yield name, torch.stack(logits), float(bits)


def _emulated(subject: Subject) -> Measured:
    """Yield what a copy of a model computes with weights that ggml has quantized."""
    import gguf
    import llama_cpp

    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    for name in ("Q8_0", "Q4_0", "Q4_K", "IQ4_XS"):
        kind = gguf.GGMLQuantizationType[name]
        model, size, weights = copy.deepcopy(subject.model), 0, 0
        for layer in _linear_layers(model):
            values = layer.weight.detach().contiguous().clone()
            quantized = torch.empty(values.nbytes, dtype=torch.uint8)
            addresses = ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(quantized.data_ptr())
            sizes = map(ctypes.c_int64, (0, *values.shape))
            written = library.ggml_quantize_chunk(int(kind), *addresses, *sizes, None)
            rows = quantized[:written].view(len(values), -1).numpy()
            layer.weight = nn.Parameter(torch.from_numpy(gguf.quants.dequantize(rows, kind)).view(values.shape))
            size, weights = size + written, weights + values.numel()
        with torch.no_grad():
            yield name, subject.logits(model), 8 * size / weights


def _scores(subject: Subject, others: Measured) -> Iterator[Scores]:
    with torch.no_grad():
        exact = log_softmax(subject.logits(subject.model), -1)
    divergence, perplexity, bits = {}, {"float32": math.exp(cross_entropy(exact, subject.targets))}, {"float32": 32.0}
    for name, logits, of_weight in (*_of_polycast(subject), *others):
        found = log_softmax(logits.float(), -1)
        by_token = (exact.exp() * (exact - found)).sum(-1)
        if name == "float32":
            assert by_token.mean() < 1e-6, f"llama.cpp computes another function: the divergence is {by_token.mean()}"
            continue
        divergence[name], bits[name] = 1000 * by_token.mean().item(), of_weight
        perplexity[name] = math.exp(cross_entropy(found, subject.targets))
    yield Scores(subject.what, "bits for each weight", "", bits)
    yield Scores(subject.what, "KL divergence from float32, thousandths", "", divergence)
    yield Scores(subject.what, "perplexity", "", perplexity)


@dataclass(frozen=True)
class Quality:
    """The scores of all models."""

    def run(self, quick: bool) -> list[Scores]:
        """Return the scores of all models."""
        answer = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int4())
        if reason := gguf_files.missing() or answer.reason:
            return [Scores("a LLaMA", "quality", "", skipped=reason)]
        scores: list[Scores] = []
        for subject in _language_models(_QUICK_STEPS if quick else _STEPS, 4 if quick else 64):
            with tempfile.TemporaryDirectory() as folder:
                scores += _scores(subject, _of_llama_cpp(subject, Path(folder)))
        checkpoint = load_checkpoint()
        if isinstance(checkpoint, str):
            return [*scores, Scores(CHECKPOINT_NAME, "quality", "", skipped=checkpoint)]
        subject = _masked_model(checkpoint)
        return [*scores, *_scores(subject, _emulated(subject))]
