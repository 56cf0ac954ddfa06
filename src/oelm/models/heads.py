"""Figures of each head of a GPT: entropy, effective rank, logit scale, distance and induction.

B batch  T tokens  D model_dim  H heads  K head_dim
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from oelm.models.gpt import GPT, Attention, TransformerBlock
from oelm.seeds import stream_seed

_REPEATED, _LONGEST = 32, 1024


@dataclass(frozen=True)
class HeadSummary:
    """One head. Entropy is in nats; induction is the weight on the token after the last occurrence of this one."""

    layer: int
    head: int
    entropy: float
    uniform_entropy: float
    effective_rank: float
    logit_std: float
    mean_distance: float
    induction: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_heads(model: GPT, tokens_BT: Tensor) -> list[HeadSummary]:
    """Summarise every head, averaged over real windows; its induction on a random sequence given twice."""
    # One window at a time, cut to a length: all scores of a layer are in memory at once.
    by_window = [_summarize_window(model, tokens_T[:_LONGEST].unsqueeze(0)) for tokens_T in tokens_BT]
    return [_averaged(summaries) for summaries in zip(*by_window, strict=True)]


def _averaged(summaries: tuple[HeadSummary, ...]) -> HeadSummary:
    rows = [summary.as_dict() for summary in summaries]
    return HeadSummary(**{name: type(value)(statistics.fmean(row[name] for row in rows)) for name, value in rows[0].items()})


@torch.no_grad()
def _summarize_window(model: GPT, tokens_BT: Tensor) -> list[HeadSummary]:
    was_training = model.training
    model.eval()
    repeats_BT = _repeated_tokens(model, tokens_BT)
    summaries: list[HeadSummary] = []
    x_BTD, y_BTD = model.embed(tokens_BT), model.embed(repeats_BT)
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, TransformerBlock)
        logits_BHTT = attention_logits(block.attention, block.attention_norm(x_BTD))
        induction_H = _induction(attention_logits(block.attention, block.attention_norm(y_BTD)).softmax(-1))
        rank_H = _effective_rank(block.attention)
        summaries += _summarize_layer(layer, logits_BHTT, induction_H, rank_H)
        x_BTD, y_BTD = block(x_BTD), block(y_BTD)
    model.train(was_training)
    return summaries


def attention_logits(attention: Attention, x_BTD: Tensor) -> Tensor:
    """Return the scaled logits of every head with the future masked out: (B, H, T, T)."""
    q_BHTK, k_BHTK = attention.heads(attention.q(x_BTD)), attention.heads(attention.k(x_BTD))
    logits_BHTT = (q_BHTK @ k_BHTK.mT) * q_BHTK.shape[-1] ** -0.5
    future_TT = torch.ones(logits_BHTT.shape[-2:], dtype=torch.bool, device=x_BTD.device).triu(1)
    return logits_BHTT.masked_fill(future_TT, float("-inf")).float()


def _repeated_tokens(model: GPT, like_BT: Tensor) -> Tensor:
    length = max(1, min(_REPEATED, model.config.seq_len // 2))
    generator = torch.Generator().manual_seed(stream_seed(0, "induction"))
    once_BT = torch.randint(model.config.vocab_size, (len(like_BT), length), generator=generator)
    return torch.cat([once_BT, once_BT], dim=1)[:, : model.config.seq_len].to(like_BT.device)


def _summarize_layer(layer: int, logits_BHTT: Tensor, induction_H: Tensor, rank_H: Tensor) -> list[HeadSummary]:
    weights_BHTT = logits_BHTT.softmax(-1)
    num_tokens = logits_BHTT.shape[-1]
    positions_T = torch.arange(num_tokens, device=logits_BHTT.device)
    distance_TT = (positions_T[:, None] - positions_T[None, :]).clamp(min=0).float()
    entropy_H = -(weights_BHTT * weights_BHTT.clamp_min(1e-30).log()).sum(-1).mean((0, 2))
    distance_H = (weights_BHTT * distance_TT).sum(-1).mean((0, 2))
    visible_TT = positions_T[:, None] >= positions_T[None, :]
    logit_std_H = logits_BHTT.transpose(0, 1)[:, :, visible_TT].flatten(1).std(1, correction=0)
    uniform = float((positions_T + 1.0).log().mean())
    return [
        HeadSummary(
            layer=layer,
            head=head,
            entropy=float(entropy_H[head]),
            uniform_entropy=uniform,
            effective_rank=float(rank_H[head]),
            logit_std=float(logit_std_H[head]),
            mean_distance=float(distance_H[head]),
            induction=float(induction_H[head]),
        )
        for head in range(len(entropy_H))
    ]


def _induction(weights_BHTT: Tensor) -> Tensor:
    """Return the mean weight that the second copy of each token gives to the token after the first copy."""
    half = weights_BHTT.shape[-1] // 2
    if half < 2:  # the context is too short for two copies
        return torch.zeros(weights_BHTT.shape[1])
    second_T = torch.arange(half, 2 * half - 1, device=weights_BHTT.device)
    return weights_BHTT[:, :, second_T, second_T - half + 1].mean((0, 2))


def _effective_rank(attention: Attention) -> Tensor:
    """Return, per head, exp of the entropy of the normalised singular values of W_q^T W_k (0 for an empty map)."""
    # The projections as functions, not their stored weights: these lack the learnt gains and corrections.
    basis_DD = torch.eye(attention.v.weight.shape[1]).to(attention.v.weight)
    # On the CPU: not every device factors matrices.
    q_HKD, k_HKD = (
        projection(basis_DD).detach().float().cpu().T.unflatten(0, (attention.num_heads, -1))
        for projection in (attention.q, attention.k)
    )
    # Singular values of the D x D form through its K x K core: the QR factors of both sides carry all of them.
    r_q, r_k = torch.linalg.qr(q_HKD.mT).R, torch.linalg.qr(k_HKD.mT).R
    values_HK = torch.linalg.svdvals(r_q @ r_k.mT)
    share_HK = values_HK / values_HK.sum(-1, keepdim=True).clamp_min(1e-30)
    rank_H = (-(share_HK * share_HK.clamp_min(1e-30).log()).sum(-1)).exp()
    return torch.where(values_HK.sum(-1) > 0, rank_H, torch.zeros_like(rank_H))
