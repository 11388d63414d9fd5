"""Files of llama.cpp: a LLaMA of transformers as GGUF, quantized by llama.cpp itself, and logits computed from them."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FORMATS = {"Q4_0": 2, "Q4_K_M": 15, "Q8_0": 7, "F16": 1, "BF16": 32}
"""The formats that are timed, with their numbers as `llama_ftype`."""
_ALL = {**FORMATS, "Q4_K": 14, "IQ4_XS": 30}
_FIRST_BYTE = 3
"""The token of the character 0, after <unk>, <s> and </s>."""
_PURE = {"Q4_K"}
"""Formats that all matrices get; others give some of them more bits."""


def missing() -> str:
    """Return why nothing can be measured of llama.cpp; empty if it can."""
    for distribution, module in (("llama-cpp-python", "llama_cpp"), ("gguf", "gguf")):
        try:
            __import__(module)
        except ImportError as error:
            return f"{distribution} is not installed, or does not work here ({error})"
    return ""


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the weight of q or k as llama.cpp expects it: it rotates neighbours, where transformers rotates halves."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write(model: Any, path: Path) -> None:
    """Write the weights of a LlamaForCausalLM in float32, with a vocabulary for :func:`tokens_of`."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        rotated = heads.get(".".join(name.rsplit(".", 2)[-2:]))
        values = permuted(weight, rotated) if rotated else weight
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, size: int) -> None:
    """Add a vocabulary in which each character of ASCII is a token, and other tokens have names."""
    from gguf import TokenType

    kinds = [(TokenType.UNKNOWN, "<unk>"), (TokenType.CONTROL, "<s>"), (TokenType.CONTROL, "</s>")]
    kinds += [(TokenType.BYTE, f"<0x{byte:02X}>") for byte in range(128)]
    kinds += [(TokenType.NORMAL, f"<{number}>") for number in range(len(kinds), size)]
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([name for _, name in kinds[:size]])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([kind for kind, _ in kinds[:size]])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text of ASCII."""
    return [_FIRST_BYTE + byte for byte in text.encode("ascii")]


def quantize(source: Path, target: Path, name: str) -> None:
    """Write a file in another format, as llama.cpp's own program does.

    Raises:
        RuntimeError: llama.cpp refused.
    """
    import llama_cpp

    _be_quiet()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = _ALL[name]
    options.pure = name in _PURE
    if llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp did not write {target.name} from {source.name}.")


@dataclass
class Model:
    """A model that llama.cpp has loaded, with a context for one sequence and one for several.

    Attributes:
        path: the file.
        cells: the tokens that a sequence may have, by the most sequences of a context.
        exact: whether keys and values are kept in float32; otherwise in float16, as llama.cpp does by default.
    """

    path: Path
    cells: Mapping[int, int]
    exact: bool = False
    _contexts: dict[int, Any] = field(default_factory=dict)
    _threads: int = 1

    def __post_init__(self) -> None:
        import llama_cpp

        _be_quiet()
        self._library = llama_cpp
        self._model = llama_cpp.llama_model_load_from_file(bytes(self.path), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp did not load {self.path.name}.")

    def set_threads(self, threads: int) -> None:
        """Compute on a number of threads from now on."""
        self._threads = threads
        for context in self._contexts.values():
            self._library.llama_set_n_threads(context, threads, threads)

    def _context(self, sequences: int) -> Any:
        most = min(each for each in self.cells if each >= sequences)
        if most not in self._contexts:
            options = self._library.llama_context_default_params()
            options.n_seq_max, options.n_ctx = most, most * self.cells[most]
            options.n_batch = max(options.n_batch, self.cells[most])
            options.n_threads = options.n_threads_batch = self._threads
            if self.exact:
                options.type_k = options.type_v = 0  # GGML_TYPE_F32
                options.flash_attn_type = 0  # it would compute in float16
            self._contexts[most] = self._library.llama_init_from_model(self._model, options)
        return self._contexts[most]

    def decode(self, tokens: Sequence[int], start: int = 0, sequences: int = 1, most: int = 1) -> None:
        """Compute the logits after the last token of sequences of equal tokens, which begin at a position.

        Later tokens are forgotten.

        Args:
            tokens: the tokens of each sequence.
            start: the position of the first.
            sequences: the number of sequences.
            most: the number of sequences that the context must have room for.

        Raises:
            RuntimeError: llama.cpp refused.
        """
        batch = self._library.llama_batch_init(len(tokens) * sequences, 0, 1)
        for sequence in range(sequences):
            for place, token in enumerate(tokens):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, start + place
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = place == len(tokens) - 1
                batch.n_tokens = at + 1
        context = self._context(max(sequences, most))
        self._library.llama_memory_seq_rm(self._library.llama_get_memory(context), -1, start, -1)
        failed = self._library.llama_decode(context, batch)
        self._library.llama_synchronize(context)
        self._library.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama.cpp did not decode {len(tokens)} tokens of {sequences} sequences: {failed}.")

    def logits(self, sequences: int = 1) -> torch.Tensor:
        """Return the logits of the last call of :meth:`decode` for the last sequence."""
        library = self._library
        size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        found = library.llama_get_logits_ith(self._context(sequences), -1)
        return torch.tensor(found[:size])

    def save(self, path: Path, sequences: int = 1) -> None:
        """Write the keys and values of the first of so many sequences."""
        context = self._context(sequences)
        state = (ctypes.c_uint8 * self._library.llama_state_seq_get_size(context, 0))()
        self._library.llama_state_seq_get_data(context, state, len(state), 0)
        path.write_bytes(state)

    def load(self, path: Path, sequences: int = 1) -> None:
        """Give each of so many sequences the keys and values of a file, which a context of as many has written.

        Raises:
            RuntimeError: llama.cpp refused.
        """
        state = (ctypes.c_uint8 * path.stat().st_size).from_buffer_copy(path.read_bytes())
        for sequence in range(sequences):
            if not self._library.llama_state_seq_set_data(self._context(sequences), state, len(state), sequence):
                raise RuntimeError(f"llama.cpp did not load {path.name}.")


def _be_quiet() -> None:
    """Drop llama.cpp's log."""
    import llama_cpp

    llama_cpp.llama_log_set(_DROP, ctypes.c_void_p())


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _DROP(*_: object) -> None:
    """Ignore a line."""
