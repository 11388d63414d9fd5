"""Models of transformers by family, with random weights: real architectures, four layers or so, width 512 or more."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

Inputs = Mapping[str, Any]

_WORDS, _FEW, _MANY = 4096, 1, 128
_IMAGE, _FEW_IMAGES, _MANY_IMAGES = 224, 1, 4
_WIDTH, _LAYERS, _HEADS, _INNER = 1024, 4, 16, 4096


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: of the family.
        make: returns a model.
        inputs: returns the model's arguments for so many tokens or images.
        sizes: the numbers of tokens or images, few and many.
        unit: what these are.
        convolves: whether the recipe must compute convolutions too, which recipes do not by default.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    sizes: tuple[int, int] = (_FEW, _MANY)
    unit: str = "token"
    convolves: bool = False

    def what(self, size: int) -> str:
        """Return the name of the family with a size."""
        return f"{self.name}, {size} {self.unit}{'s' if size > 1 else ''}"


def _of(kind: str, config: str, **settings: Any) -> nn.Module:
    """Return a model from a configuration, by the names of their classes in transformers."""
    made = getattr(transformers, config)(**settings)
    model: nn.Module = getattr(transformers, kind)(made)
    return model


def _tokens(size: int) -> Inputs:
    return {"input_ids": torch.randint(3, 1000, (1, size))}


def _pairs(size: int) -> Inputs:
    return {**_tokens(size), "decoder_input_ids": torch.randint(3, 1000, (1, size))}


def _images(count: int, size: int = _IMAGE) -> Inputs:
    return {"pixel_values": torch.randn(count, 3, size, size)}


def _decoder(name: str, prefix: str = "", **settings: Any) -> Family:
    """Return a family of decoders whose configurations have the common names."""
    common = {"vocab_size": _WORDS, "hidden_size": _WIDTH, "num_hidden_layers": _LAYERS, "use_cache": False}
    heads = {"num_attention_heads": _HEADS, "intermediate_size": _INNER}
    prefix = prefix or name.replace("-", "")
    make = functools.partial(_of, f"{prefix}ForCausalLM", f"{prefix}Config", **{**common, **heads, **settings})
    return Family(name, make, _tokens)


def _encoder(name: str, prefix: str, **settings: Any) -> Family:
    """Return a family of encoders, most of which have BERT's names."""
    sizes = {"vocab_size": _WORDS, "hidden_size": 768, "num_hidden_layers": _LAYERS, "num_attention_heads": 12}
    made = {**sizes, "intermediate_size": 3072, **settings}
    return Family(name, functools.partial(_of, f"{prefix}Model", f"{prefix}Config", **made), _tokens)


def _vision(name: str, kind: str, config: str, **settings: Any) -> Family:
    sizes = {"sizes": (_FEW_IMAGES, _MANY_IMAGES), "unit": "image"}
    return Family(name, functools.partial(_of, kind, config, **settings), _images, convolves=True, **sizes)  # type: ignore[arg-type]


class _LanguageLstm(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.lstm = nn.LSTM(_WIDTH, _WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the logits."""
        return (self.head(self.lstm(self.embedding(input_ids))[0]),)


class _Encoder(nn.Module):
    """torch's own encoder over tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
        self.embedding = nn.Embedding(_WORDS, 768)
        self.encoder = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the last hidden states."""
        return (self.encoder(self.embedding(input_ids)),)


class _Clip(nn.Module):
    """CLIP with its embeddings as the output, in place of their few products."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the embeddings of texts and images."""
        out = self.model(**inputs)
        return (torch.cat([out.text_embeds, out.image_embeds]),)


def _clip() -> nn.Module:
    both = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": _LAYERS, "num_attention_heads": 12}
    text = {**both, "vocab_size": _WORDS, "eos_token_id": 2, "bos_token_id": 1}
    return _Clip(_of("CLIPModel", "CLIPConfig", text_config=text, vision_config={**both, "patch_size": 32}))


def _clip_inputs(count: int) -> Inputs:
    return {"input_ids": torch.randint(3, 1000, (count, 32)), **_images(count)}


def _whisper() -> nn.Module:
    sizes = {"d_model": 768, "encoder_layers": _LAYERS, "decoder_layers": _LAYERS, "max_source_positions": 256}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    inner = {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": _WORDS, "use_cache": False}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return _of("WhisperForConditionalGeneration", "WhisperConfig", **sizes, **heads, **inner, **ids)


def _whisper_inputs(tokens: int) -> Inputs:
    """Return one token with the encoder's output, or the whole: 5 seconds of sound, and many tokens."""
    heard = {"encoder_outputs": (torch.randn(1, 256, 768),)} if tokens == 1 else {}
    sound = {} if heard else {"input_features": torch.randn(1, 80, 512)}
    return {**heard, **sound, "decoder_input_ids": torch.randint(3, 1000, (1, tokens))}


def _sound(seconds: int) -> Inputs:
    return {"input_values": torch.randn(1, 16000 * seconds)}


_EXPERTS = {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1792}


def _experts_one_by_one() -> nn.Module:
    model: Any = _decoder("Mixtral", **_EXPERTS).make()
    model.set_experts_implementation("eager")
    found: nn.Module = model
    return found


_BART = {
    **{"vocab_size": _WORDS, "d_model": 768, "encoder_layers": _LAYERS, "decoder_layers": _LAYERS, "use_cache": False},
    **{"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12},
}
_GPT2 = {"vocab_size": _WORDS, "n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "use_cache": False}
_MPT = {"vocab_size": _WORDS, "d_model": _WIDTH, "n_layers": _LAYERS, "n_heads": _HEADS, "use_cache": False}
_T5 = {"vocab_size": _WORDS, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": _LAYERS, "num_heads": 12}
_BLOOM = {"vocab_size": _WORDS, "hidden_size": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "use_cache": False}
_OPT = {"ffn_dim": _INNER, "word_embed_proj_dim": _WIDTH}
_VIT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": _LAYERS, "num_attention_heads": 12}
_DISTIL = {"vocab_size": _WORDS, "dim": 768, "hidden_dim": 3072, "n_layers": _LAYERS, "n_heads": 12}
_GEMMA = {"num_key_value_heads": 4, "head_dim": 64, "pad_token_id": 0}
_GROUPED = {"num_key_value_heads": 4}
_RWKV = {"vocab_size": _WORDS, "hidden_size": 768, "num_hidden_layers": _LAYERS, "use_cache": False}
_SWIN = {"embed_dim": 128, "depths": [2, 2, 6, 2], "num_heads": [4, 8, 16, 32]}
_CONVNEXT = {"depths": [3, 3, 3, 3], "layer_scale_init_value": 1.0}
_SEGFORMER = {"hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 64}

FAMILIES: tuple[Family, ...] = (
    Family("GPT-2", functools.partial(_of, "GPT2LMHeadModel", "GPT2Config", **_GPT2), _tokens),
    _decoder("LLaMA", "Llama", **_GROUPED),
    _decoder("Mistral", **_GROUPED),
    _decoder("Qwen2", **_GROUPED),
    _decoder("Gemma", **_GEMMA),
    _decoder("Phi"),
    _decoder("Falcon", ffn_hidden_size=_INNER),
    _decoder("GPT-NeoX", "GPTNeoX"),
    _decoder("OPT", **_OPT),
    Family("BLOOM", functools.partial(_of, "BloomForCausalLM", "BloomConfig", **_BLOOM), _tokens),
    Family("MPT", functools.partial(_of, "MptForCausalLM", "MptConfig", **_MPT), _tokens),
    _decoder("Mixtral", **_EXPERTS),
    Family("Mixtral, experts one by one", _experts_one_by_one, _tokens),
    Family("Mamba", _decoder("Mamba").make, _tokens),
    Family("RWKV", functools.partial(_of, "RwkvForCausalLM", "RwkvConfig", **_RWKV), _tokens),
    Family("an LSTM language model", _LanguageLstm, _tokens),
    Family("T5", functools.partial(_of, "T5ForConditionalGeneration", "T5Config", **_T5), _pairs),
    Family("BART", functools.partial(_of, "BartForConditionalGeneration", "BartConfig", **_BART), _pairs),
    Family("Whisper", _whisper, _whisper_inputs, convolves=True),
    _encoder("BERT", "Bert"),
    _encoder("RoBERTa", "Roberta"),
    Family("DistilBERT", functools.partial(_of, "DistilBertModel", "DistilBertConfig", **_DISTIL), _tokens),
    _encoder("ALBERT", "Albert"),
    _encoder("ELECTRA", "Electra", embedding_size=768),
    _encoder("DeBERTa-v2", "DebertaV2", **_DEBERTA),
    Family("nn.TransformerEncoder", _Encoder, _tokens),
    Family("CLIP", _clip, _clip_inputs, (_FEW_IMAGES, _MANY_IMAGES), "image", convolves=True),
    _vision("ViT", "ViTModel", "ViTConfig", **_VIT),
    _vision("DeiT", "DeiTModel", "DeiTConfig", **_VIT),
    _vision("Swin", "SwinModel", "SwinConfig", **_SWIN),
    _vision("SegFormer", "SegformerModel", "SegformerConfig", **_SEGFORMER),
    _vision("ConvNeXt", "ConvNextModel", "ConvNextConfig", **_CONVNEXT),
    _vision("RegNet", "RegNetModel", "RegNetConfig"),
    _vision("ResNet-50", "ResNetForImageClassification", "ResNetConfig"),
    _vision("MobileNetV2", "MobileNetV2Model", "MobileNetV2Config"),
    Family(
        "Wav2Vec2",
        functools.partial(_of, "Wav2Vec2Model", "Wav2Vec2Config", **_VIT),
        _sound,
        (1, 4),
        "second",
        convolves=True,
    ),
)
