"""The learning rate of a step: warm-up, then cosine; an extended run continues on the longer cosine."""

from __future__ import annotations

import math

from oelm.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of the update that takes the model from `step` to `step + 1`."""
    # An extended run followed the shorter schedule up to its old end; its config alone reproduces that.
    horizon = next(stage for stage in (*config.extended_at, config.steps) if step < stage)
    return config.optim.lr * _fraction(config, step, horizon)


def warmup_steps(config: TrainConfig, horizon: int) -> int:
    """Return the warm-up steps of a training of `horizon` steps: at most half of them; a method may set its own."""
    return min(_asked(config), horizon // 2)


def shortened_warmup(config: TrainConfig) -> str:
    """Return a remark if a run is too short for its warm-up, else ''."""
    # An extended run warmed up for its first length.
    horizon = (*config.extended_at, config.steps)[0]
    used, asked = warmup_steps(config, horizon), _asked(config)
    # 0: the steps follow from epochs, and are not known yet.
    if horizon == 0 or used == asked:
        return ""
    key = "schedule.warmup_steps" if config.method.warmup_steps is None else "method.warmup_steps"
    return f"{key} {asked} is cut to {used}: a warm-up is at most half of the run's {horizon} steps"


def _asked(config: TrainConfig) -> int:
    own = config.method.warmup_steps
    return config.schedule.warmup_steps if own is None else own


def _fraction(config: TrainConfig, step: int, horizon: int) -> float:
    warmup = warmup_steps(config, horizon)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, horizon - warmup)
    floor = config.schedule.final_fraction
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
