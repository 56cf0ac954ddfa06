"""What a run's model holds frozen at a step, by its method's plan."""

from __future__ import annotations

from torch import nn

from oelm.config import TrainConfig
from oelm.method.apply import freeze, hold
from oelm.method.plan import Plan, plan_of


def freeze_as_of(model: nn.Module, config: TrainConfig, *, step: int) -> Plan:
    """Freeze a model as it is frozen once `step` updates are done; return the plan of what is frozen when."""
    freeze(model, config.method, seed=config.seed)
    # An extended run keeps the plan of its first length: what is past is not planned again.
    plan = plan_of(model, config.method, steps=(*config.extended_at, config.steps)[0])
    hold(model, plan.frozen_at(max(0, step - 1)))
    return plan
