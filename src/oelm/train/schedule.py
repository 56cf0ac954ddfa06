"""The learning rate of a step: warm-up, then cosine; an extended run enters the longer cosine where it stands."""

from __future__ import annotations

import math

from oelm.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of the update that takes the model from `step` to `step + 1`."""
    # An extended run followed the shorter schedule up to its old end; repeating it from its config gives the same.
    horizon = next(stage for stage in (*config.extended_at, config.steps) if step < stage)
    return config.optim.lr * _fraction(config, step, horizon)


def warmup_steps(config: TrainConfig, horizon: int) -> int:
    """Return the steps of warm-up in a training of `horizon` steps, half of them at most; an arm may have its own."""
    own = config.method.warmup_steps
    return min(config.schedule.warmup_steps if own is None else own, horizon // 2)


def _fraction(config: TrainConfig, step: int, horizon: int) -> float:
    warmup = warmup_steps(config, horizon)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, horizon - warmup)
    floor = config.schedule.final_fraction
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
