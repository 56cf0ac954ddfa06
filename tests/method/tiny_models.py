"""The smallest model of every architecture we know, from its config alone, and inputs for it.

Imports oelm only for our own GPT: a process without it reads back what was saved.

Width 32, two layers, heads of 8 unless said otherwise; `frozen` is counted by hand from those numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, VOCAB, BATCH, TOKENS, CLASSES = 32, 37, 2, 6, 3
_SQUARE = WIDTH * WIDTH
_SQUARE_BIASED = _SQUARE + WIDTH
_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2}
_LLAMA.pop("num_labels")


@dataclass(frozen=True)
class Tiny:
    """One architecture: how to build it, what to feed it, and what freezing Q and K must find."""

    name: str
    build: Callable[[], nn.Module]
    num_sites: int
    frozen: int
    is_fused: bool = False
    heads: tuple[int, int] = (4, 4)  # of Q and of K
    inputs: str = "input_ids"

    @property
    def is_from_transformers(self) -> bool:
        return not self.name.startswith(("torch", "our"))


@cache
def _built(tiny: Tiny, seed: int) -> nn.Module:
    # A copy may be made in any mode; what it is made from is the same in all.
    with torch.inference_mode(False):
        torch.manual_seed(seed)
        model = tiny.build()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2 or name.endswith("bias"):
                    parameter.normal_(std=WIDTH**-0.5)
        return model.eval()


def tiny_model(tiny: Tiny, *, seed: int = 0) -> nn.Module:
    """Build it with weights large enough that attention is far from uniform, and no bias zero: neither may hide a loss."""
    model = copy.deepcopy(_built(tiny, seed))
    torch.manual_seed(seed)
    return model


def tiny_inputs(tiny: Tiny, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if tiny.inputs == "pixel_values":
        return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator)}
    tokens = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=generator)
    if tiny.inputs == "both":
        return {"input_ids": tokens, "decoder_input_ids": torch.randint(3, VOCAB, (BATCH, 5), generator=generator)}
    if tiny.inputs == "encoder_hidden_states":
        return {"input_ids": tokens, "encoder_hidden_states": torch.randn(BATCH, 4, WIDTH, generator=generator)}
    return {"input_ids": tokens}


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the model's logits."""
    given: Any = model(**inputs)
    logits: Tensor = given if isinstance(given, Tensor) else given.logits
    return logits


def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return a loss that every output counts in."""
    logits = outputs(model, inputs).float().flatten(0, -2)
    labels = torch.arange(len(logits)) % logits.shape[-1]
    return F.cross_entropy(logits, labels)


def _transformers(model: str, config: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return built

    return build


class PackedTorch(nn.Module):
    """torch's own encoder and decoder, each of one layer."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        encoder = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=batch_first)
        decoder = nn.TransformerDecoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(encoder, 1)
        self.decoder = nn.TransformerDecoder(decoder, 1)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        read: Tensor = self.head(self.decoder(x, self.encoder(x, src_key_padding_mask=padding)))
        return read


class SeparateTorch(nn.Module):
    """nn.MultiheadAttention whose keys and values come from narrower inputs: separate weights, one bias for all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, kdim=24, vdim=16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x, x[..., :24], x[..., :16], need_weights=False)[0]
        read: Tensor = self.head(x)
        return read


class OurGPT(nn.Module):
    """Our GPT, which gives hidden states, and its head."""

    def __init__(self) -> None:
        from oelm.models.gpt import build_gpt
        from oelm.models.shape import GPTConfig

        super().__init__()
        config = GPTConfig(vocab_size=VOCAB, seq_len=8, model_dim=WIDTH, num_layers=2, num_heads=4, ff_dim=48, dropout=0.0)
        self.gpt = build_gpt(config, seed=torch.initial_seed())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.gpt.logits(input_ids)


def _classifier(name: str, settings: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    return _transformers(f"{name}ForSequenceClassification", f"{name}Config", settings | more)


def _causal(name: str, settings: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    return _transformers(f"{name}ForCausalLM", f"{name}Config", settings | more)


_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_DISTIL = {"vocab_size": VOCAB, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 16}
_T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 16, "num_heads": 4, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 1}
_BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 16,
}
_VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": CLASSES,
}
_BOTH = 2 * 2  # two layers, Q and K

ARCHITECTURES = [
    Tiny("bert", _classifier("Bert", _BERT), 2, _BOTH * _SQUARE_BIASED),
    Tiny("roberta", _classifier("Roberta", _BERT, pad_token_id=1), 2, _BOTH * _SQUARE_BIASED),
    Tiny("xlm_roberta", _classifier("XLMRoberta", _BERT, pad_token_id=1), 2, _BOTH * _SQUARE_BIASED),
    Tiny("distilbert", _classifier("DistilBert", _DISTIL, num_labels=CLASSES), 2, _BOTH * _SQUARE_BIASED),
    # Heads of 16 from embeddings of 24, projected.
    Tiny(
        "electra",
        _classifier("Electra", _BERT, embedding_size=24, num_attention_heads=2),
        2,
        _BOTH * _SQUARE_BIASED,
        heads=(2, 2),
    ),
    Tiny("gpt2", _transformers("GPT2LMHeadModel", "GPT2Config", _GPT2), 2, _BOTH * _SQUARE_BIASED, is_fused=True),
    Tiny(
        "gpt2_cross",
        _transformers("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "add_cross_attention": True}),
        4,
        2 * _BOTH * _SQUARE_BIASED,
        is_fused=True,
        inputs="encoder_hidden_states",
    ),
    Tiny("gpt_neox", _causal("GPTNeoX", _BERT), 2, _BOTH * _SQUARE_BIASED, is_fused=True),
    Tiny("opt", _causal("OPT", {**_BERT, "ffn_dim": 48, "word_embed_proj_dim": WIDTH}), 2, _BOTH * _SQUARE_BIASED),
    Tiny("llama", _causal("Llama", _LLAMA), 2, 2 * (_SQUARE + _SQUARE // 2), heads=(4, 2)),
    Tiny("mistral", _causal("Mistral", _LLAMA), 2, 2 * (_SQUARE + _SQUARE // 2), heads=(4, 2)),
    Tiny("qwen2", _causal("Qwen2", _LLAMA), 2, 2 * (_SQUARE_BIASED + _SQUARE_BIASED // 2), heads=(4, 2)),
    # Heads of 16, so that four of them are twice as wide as the model.
    Tiny("qwen3", _causal("Qwen3", _LLAMA, head_dim=16), 2, 2 * (2 * _SQUARE + _SQUARE), heads=(4, 2)),
    # Two encoder layers; one decoder layer with two attentions; heads of 16.
    Tiny("t5", _transformers("T5ForConditionalGeneration", "T5Config", _T5), 4, 4 * 2 * 2 * _SQUARE, inputs="both"),
    # One encoder layer; two decoder layers with two attentions each.
    Tiny(
        "bart",
        _transformers("BartForConditionalGeneration", "BartConfig", _BART),
        5,
        5 * 2 * _SQUARE_BIASED,
        inputs="both",
    ),
    Tiny(
        "vit", _transformers("ViTForImageClassification", "ViTConfig", _VIT), 2, _BOTH * _SQUARE_BIASED, inputs="pixel_values"
    ),
    Tiny("torch", PackedTorch, 3, 3 * 2 * _SQUARE_BIASED, is_fused=True),
    Tiny("torch_separate", SeparateTorch, 2, 2 * (_SQUARE_BIASED + 24 * WIDTH + WIDTH), is_fused=True),
    Tiny("our_gpt", OurGPT, 2, _BOTH * _SQUARE),
]
BY_NAME = {tiny.name: tiny for tiny in ARCHITECTURES}
