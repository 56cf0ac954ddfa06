"""Cross-entropy of the output head, computed in chunks together with its gradient: the full logits never exist.

N tokens  D model_dim  V vocab  C tokens of one chunk
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oelm.models.shape import chunk_rows


def mean_cross_entropy(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the mean loss of predicting `targets_N`, as a scalar with gradients to hidden states and head."""
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden_ND, head_VD, targets_N)
    return loss


@torch.no_grad()
def token_losses(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return each token's loss in float32, without gradients: (N,)."""
    rows = chunk_rows(head_VD.shape[0])
    return torch.cat(
        [
            torch.nn.functional.cross_entropy((hidden_CD @ head_VD.T).float(), targets_C, reduction="none")
            for hidden_CD, targets_C in zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
        ]
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients of the *sum* in the forward pass, and scales them in the backward pass.

    So the loss scale of float16 training is not needed here, and small probabilities are not divided by N before a
    half-precision product, where they would vanish.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Tensor:
        device = hidden_ND.device.type
        # Under autocast only the products use its dtype; exponentials, sums and the head's gradient stay wide.
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        with torch.autocast(device, enabled=False):
            hidden, head = hidden_ND.to(narrow), head_VD.to(narrow)
            grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
            grad_head = torch.zeros_like(head_VD) if ctx.needs_input_grad[1] else None
            rows = chunk_rows(head_VD.shape[0])
            total = torch.zeros((), dtype=_wide(narrow), device=hidden.device)
            for start in range(0, len(hidden), rows):
                total += _chunk(hidden, head, targets_N, slice(start, start + rows), grad_hidden, grad_head)
        ctx.num_tokens, ctx.hidden_dtype = len(hidden), hidden_ND.dtype
        ctx.save_for_backward(grad_hidden, grad_head)
        return total / ctx.num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_loss / ctx.num_tokens
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(ctx.hidden_dtype) * scale
        if grad_head is not None:
            grad_head = grad_head * scale
        return grad_hidden, grad_head, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunk(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    chunk: slice,
    grad_hidden: Tensor | None,
    grad_head: Tensor | None,
) -> Tensor:
    """Return the summed loss of one chunk; write its gradients if they are wanted."""
    hidden_CD, targets_C1 = hidden_ND[chunk], targets_N[chunk].unsqueeze(1)
    logits_CV = (hidden_CD @ head_VD.T).to(_wide(hidden_ND.dtype))
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    target_C1 = logits_CV.gather(1, targets_C1)
    logits_CV.sub_(largest_C1).exp_()  # in place from here: this is the largest tensor of the whole step
    sum_C1 = logits_CV.sum(dim=1, keepdim=True)
    loss = (sum_C1.log() + largest_C1 - target_C1).sum()
    grad_logits_CV = logits_CV.div_(sum_C1)
    grad_logits_CV.scatter_add_(1, targets_C1, torch.full_like(target_C1, -1.0))
    grad_logits_CV = grad_logits_CV.to(hidden_ND.dtype)
    if grad_hidden is not None:
        torch.mm(grad_logits_CV, head_VD, out=grad_hidden[chunk])
    if grad_head is not None and grad_head.dtype == hidden_ND.dtype:
        grad_head.addmm_(grad_logits_CV.T, hidden_CD)
    elif grad_head is not None:
        grad_head += grad_logits_CV.T @ hidden_CD
    return loss
