"""One optimizer update: accumulate, check, clip, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oelm.errors import NonFiniteError
from oelm.process import StopFlag
from oelm.seeds import stream_seed
from oelm.train.dist import ALONE, World, unsynced

_SMALLEST_LOSS_SCALE = 2.0**-10


@dataclass(frozen=True)
class Outcome:
    """The mean loss before an update, and the gradient's norm before clipping."""

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
    world: World = ALONE,
    forward: nn.Module | None = None,
    stop: StopFlag | None = None,
) -> Outcome:
    """Update the model once; `compute_loss(i)` returns the mean loss of micro-batch i, computed with `forward`.

    Dropout noise is a function of `noise_seed` and the micro-batch: no generator state needs saving, and any process of the
    world may compute a micro-batch. All processes get the same gradient and loss. Raises NonFiniteError, before anything is
    updated, if loss or gradient is not finite.
    """
    optimizer.zero_grad(set_to_none=True)
    losses = [0.0] * num_micro_batches
    mine = world.share(num_micro_batches)
    # A process without a micro-batch, in an epoch's last batch, adds a gradient of zeros.
    for micro_batch in mine or [0]:
        torch.manual_seed(stream_seed(noise_seed, "noise", step, micro_batch))
        with unsynced(model if forward is None else forward, is_last=micro_batch == (mine or [0])[-1]):
            loss = compute_loss(micro_batch) / num_micro_batches
            scaler.scale(loss if mine else loss * 0.0).backward()
        if mine:
            losses[micro_batch] = float(loss.detach())
    total = 0.0
    for known in world.settle(losses, stop or StopFlag()):
        total += known
    scaler.unscale_(optimizer)
    trainable = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grad_norm = float(nn.utils.clip_grad_norm_(trainable, clip_norm))
    # A float16 gradient may overflow: the scaler then skips the update and lowers its scale.
    is_overflow = scaler.is_enabled() and math.isfinite(total) and scaler.get_scale() > _SMALLEST_LOSS_SCALE
    if not math.isfinite(total) or (not math.isfinite(grad_norm) and not is_overflow):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteError(
            f"step {step + 1}: loss {total}, gradient norm {grad_norm}: stopped before the update. The batch holds "
            f"{list(batch_ids)} (windows by their first token, or examples by number)"
        )
    scaler.step(optimizer)
    scaler.update()
    return Outcome(loss=total, grad_norm=grad_norm)
