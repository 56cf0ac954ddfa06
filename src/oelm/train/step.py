"""One optimizer update: accumulate, check, clip, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oelm.errors import NonFiniteError
from oelm.seeds import stream_seed

_SMALLEST_LOSS_SCALE = 2.0**-10


@dataclass(frozen=True)
class Outcome:
    """What an update did: mean loss before it, and the gradient's norm before clipping."""

    loss: float
    grad_norm: float


def train_step(
    compute_loss: Callable[[int], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    num_micro_batches: int,
    clip_norm: float,
    noise_seed: int,
    batch_ids: Sequence[int],
    step: int,
) -> Outcome:
    """Update the model once; `compute_loss(i)` gives the mean loss of micro-batch i.

    Dropout's noise is a function of `noise_seed` and the micro-batch, so that no generator state needs saving.
    Raises NonFiniteError, before anything is updated, when loss or gradient is not finite.
    """
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for micro_batch in range(num_micro_batches):
        torch.manual_seed(stream_seed(noise_seed, "noise", step, micro_batch))
        loss = compute_loss(micro_batch) / num_micro_batches
        scaler.scale(loss).backward()
        total += float(loss.detach())
    scaler.unscale_(optimizer)
    trainable = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grad_norm = float(nn.utils.clip_grad_norm_(trainable, clip_norm))
    # A float16 gradient may overflow now and then: the scaler then skips the update and lowers its scale.
    is_overflow = scaler.is_enabled() and math.isfinite(total) and scaler.get_scale() > _SMALLEST_LOSS_SCALE
    if not math.isfinite(total) or (not math.isfinite(grad_norm) and not is_overflow):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteError(
            f"step {step + 1}: loss {total}, gradient norm {grad_norm}: stopped before the update. The batch holds "
            f"{list(batch_ids)} (windows by their first token, or examples by number). Checkpoints of earlier steps are good: "
            "in a new run, lower optim.lr, raise schedule.warmup_steps or use precision float32"
        )
    scaler.step(optimizer)
    scaler.update()
    return Outcome(loss=total, grad_norm=grad_norm)
