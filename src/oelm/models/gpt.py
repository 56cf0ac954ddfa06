"""A GPT on one page: pre-norm, learned positions, tied embeddings, exact GELU, no attention biases.

B batch  T tokens  D model_dim  H heads  K head_dim  V vocab  S queries of a block  E tokens up to its end
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from oelm.errors import ConfigError
from oelm.models.shape import GPTConfig
from oelm.seeds import stream_seed, whole_seed

INIT_STD = 0.02
_ROWS = 128  # of a block of queries


class LayerCache:
    """Keys and values of the tokens that one layer has seen, with room for a whole context."""

    def __init__(self, config: GPTConfig, *, batch_size: int, like: Tensor) -> None:
        shape = (batch_size, config.num_heads, config.seq_len)
        self.k_BHTK = like.new_empty(*shape, config.qk_rows // config.num_heads)
        self.v_BHTK = like.new_empty(*shape, config.head_dim)
        self.length = 0

    def extend(self, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values; return all so far."""
        start, self.length = self.length, self.length + k_BHTK.shape[2]
        self.k_BHTK[:, :, start : self.length] = k_BHTK
        self.v_BHTK[:, :, start : self.length] = v_BHTK
        return self.k_BHTK[:, :, : self.length], self.v_BHTK[:, :, : self.length]


class Cache:
    """What a model keeps of the tokens it has seen: a cache per layer, and the last embeddings for a short convolution."""

    def __init__(self, config: GPTConfig, *, batch_size: int, like: Tensor) -> None:
        self.layers = [LayerCache(config, batch_size=batch_size, like=like) for _ in range(config.num_layers)]
        # Zeros before the start of a text, as in training.
        self.embedded_BTD = like.new_zeros(batch_size, config.short_conv, config.model_dim)

    @property
    def length(self) -> int:
        return self.layers[0].length


class ShortConvolution(nn.Module):
    """Adds the preceding few tokens to each token, with a weight per distance and dimension: causal and depthwise."""

    def __init__(self, num_tokens: int, model_dim: int) -> None:
        super().__init__()
        # Nearest first.
        self.weight = nn.Parameter(torch.empty(num_tokens, model_dim))

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        reach, length = len(self.weight), x_BTD.shape[1]
        before_BTD = x_BTD.new_zeros(len(x_BTD), reach, x_BTD.shape[2]) if cache is None else cache.embedded_BTD
        seen_BTD = torch.cat([before_BTD, x_BTD], dim=1)
        if cache is not None:
            # A copy: a view would keep the whole prompt.
            cache.embedded_BTD = seen_BTD[:, length:].clone()
        for distance, weight_D in enumerate(self.weight, start=1):
            x_BTD = x_BTD + weight_D * seen_BTD[:, reach - distance : reach - distance + length]
        return x_BTD


def attend_by_blocks(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, *, dropout: float) -> Tensor:
    """Attend causally with dropout, a block of queries at a time, to the keys before the block's end.

    With dropout PyTorch has no fused attention on a CPU: it computes the scores of all future tokens, too. Blocks leave most
    of them out, which pays from 512 tokens on (benchmarks/engine_ideas.py).
    """
    mixed = []
    for start in range(0, q_BHTK.shape[2], _ROWS):
        q_BHSK = q_BHTK[:, :, start : start + _ROWS] * q_BHTK.shape[3] ** -0.5
        end = start + q_BHSK.shape[2]
        scores_BHSE = q_BHSK @ k_BHTK[:, :, :end].transpose(-1, -2)
        is_future_SE = torch.ones(end - start, end, dtype=torch.bool, device=q_BHTK.device).triu(start + 1)
        weights_BHSE = F.dropout(scores_BHSE.masked_fill(is_future_SE, -torch.inf).softmax(-1), dropout)
        mixed.append(weights_BHSE @ v_BHTK[:, :, :end])
    return torch.cat(mixed, dim=2)


def widened(x_BHTK: Tensor, width: int) -> Tensor:
    """Return heads with zeros up to a width: PyTorch's attention on a CPU is fused only if Q, K and V have one width."""
    missing = width - x_BHTK.shape[-1]
    return F.pad(x_BHTK, (0, missing)) if missing > 0 else x_BHTK


class Attention(nn.Module):
    """Causal self-attention. Q, K and V are separate weights, so that freezing one costs the others nothing."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.q = nn.Linear(config.model_dim, config.qk_rows, bias=False)
        self.k = nn.Linear(config.model_dim, config.qk_rows, bias=False)
        self.v = nn.Linear(config.model_dim, config.model_dim, bias=False)
        self.out = nn.Linear(config.model_dim, config.model_dim, bias=False)

    def heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = self.heads(self.q(x_BTD)), self.heads(self.k(x_BTD)), self.heads(self.v(x_BTD))
        # A single new token sees all earlier ones; several at once are the start of a text.
        is_causal = cache is None or q_BHTK.shape[2] > 1
        if cache is not None:
            k_BHTK, v_BHTK = cache.extend(k_BHTK, v_BHTK)
        dropout = self.dropout if self.training else 0.0
        if dropout and is_causal and x_BTD.device.type == "cpu" and x_BTD.shape[1] >= 4 * _ROWS:
            mixed_BHTK = attend_by_blocks(q_BHTK, k_BHTK, v_BHTK, dropout=dropout)
        else:
            scale = q_BHTK.shape[-1] ** -0.5
            if is_causal and not dropout and x_BTD.device.type == "cpu":
                q_BHTK, k_BHTK = widened(q_BHTK, v_BHTK.shape[-1]), widened(k_BHTK, v_BHTK.shape[-1])
            mixed_BHTK = F.scaled_dot_product_attention(
                q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=is_causal, scale=scale
            )
        out: Tensor = self.out(mixed_BHTK.transpose(1, 2).flatten(-2))
        return out


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on a normed copy and added back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.model_dim)
        self.attention = Attention(config)
        self.ff_norm = nn.LayerNorm(config.model_dim)
        self.ff_in = nn.Linear(config.model_dim, config.ff_dim)
        self.ff_out = nn.Linear(config.ff_dim, config.model_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), cache))
        out: Tensor = x_BTD + self.dropout(self.ff_out(F.gelu(self.ff_in(self.ff_norm(x_BTD)))))
        return out


class GPT(nn.Module):
    """Maps token ids to final hidden states; the output head is the token embedding itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.vocab_size == 0:
            raise ConfigError("model.vocab_size is 0: give the tokenizer's vocabulary size")
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.model_dim)
        self.position_embedding = nn.Embedding(config.seq_len, config.model_dim)
        self.short_conv = ShortConvolution(config.short_conv, config.model_dim) if config.short_conv else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.model_dim)

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the hidden states that the head reads: (B, T, D). Training multiplies by the head in chunks.

        With a cache the tokens continue those seen before; several at once only where it is empty.
        """
        x_BTD = self.dropout(self.embed(tokens_BT, cache))
        for layer, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, cache.layers[layer] if cache else None)
        hidden: Tensor = self.final_norm(x_BTD)
        return hidden

    def embed(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Return what the first layer reads, before dropout: (B, T, D)."""
        first = cache.length if cache else 0
        if first + tokens_BT.shape[1] > self.config.seq_len:
            raise ConfigError(f"{first + tokens_BT.shape[1]} tokens exceed the model's context of {self.config.seq_len}")
        positions_T = torch.arange(first, first + tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: Tensor = self.token_embedding(tokens_BT) + self.position_embedding(positions_T)
        return x_BTD if self.short_conv is None else self.short_conv(x_BTD, cache)

    @property
    def head_VD(self) -> Tensor:
        """The output head's weight, tied to the token embedding."""
        return self.token_embedding.weight

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Return next-token logits for every position: (B, T, V)."""
        return F.linear(self(tokens_BT), self.head_VD)


class _Undrawn(TorchFunctionMode):
    """Skips what torch draws for new weights: ours are drawn otherwise, and on the meta device it loads torch's compiler."""

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        draws = getattr(function, "__module__", None) == "torch.nn.init"
        return None if draws else function(*args, **(kwargs or {}))


def skeleton(config: GPTConfig) -> GPT:
    """Return a GPT without weights, on the meta device."""
    with torch.device("meta"), _Undrawn():
        return GPT(config)


def build_gpt(config: GPTConfig, *, seed: int) -> GPT:
    """Build a GPT whose every weight is a function of (seed, its name): arms of one seed share what they share."""
    if not isinstance(config, GPTConfig):
        raise ConfigError(f"build_gpt takes an oelm.GPTConfig, not {config!r} ({type(config).__name__})")
    seed = whole_seed(seed)
    with torch.device("cpu"), _Undrawn():
        model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                generator = torch.Generator().manual_seed(stream_seed(seed, "weights", name))
                # Drawn in float64: float32 draws differ between CPUs.
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu") * INIT_STD)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
    return model
