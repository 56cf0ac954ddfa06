"""A plain PyTorch GPT of today: one product for Q, K and V, SDPA, tied head, ordinary cross-entropy.

It shares no code with `oelm`, so that a ratio against it measures our engine. B batch  T tokens  D model_dim
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainBlock(nn.Module):
    """Attention and feed-forward, each on a normed copy and added back."""

    def __init__(self, model_dim: int, num_heads: int, ff_dim: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(model_dim), nn.LayerNorm(model_dim)
        self.qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        self.out = nn.Linear(model_dim, model_dim, bias=False)
        self.ff_in, self.ff_out = nn.Linear(model_dim, ff_dim), nn.Linear(ff_dim, model_dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x_BTD)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2).flatten(-2)
        x_BTD = x_BTD + F.dropout(self.out(mixed), dropout)
        out: Tensor = x_BTD + F.dropout(self.ff_out(F.gelu(self.ff_in(self.norm_2(x_BTD)))), dropout)
        return out


class PlainGPT(nn.Module):
    """Maps tokens and targets to the mean loss."""

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        model_dim: int,
        num_layers: int,
        num_heads: int,
        ff_dim: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, model_dim), nn.Embedding(seq_len, model_dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PlainBlock(model_dim, num_heads, ff_dim, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(model_dim)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.dropout(self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1])))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = F.linear(self.norm(x_BTD), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
