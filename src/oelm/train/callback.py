"""`OelmCallback`: the guards of our loop in `transformers.Trainer`."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch import nn

from oelm.errors import MethodError, MissingExtraError
from oelm.method.apply import hold, thaw
from oelm.method.audit import assert_unmoved, audit, check_frozen
from oelm.method.plan import Plan, plan_of
from oelm.method.record import methods_of, record_of

try:
    from transformers import TrainerCallback
except ImportError:
    raise MissingExtraError("transformers", "hf") from None

log = logging.getLogger(__name__)


class OelmCallback(TrainerCallback):
    """Reports at the start what is frozen, proves by digest at every save that it has not moved, and follows the method.

    A method that thaws or freezes in the course of training (`Method.thaw`, `Method.freeze_at`) does so at the same steps as
    in our loop. `thaw_at` instead is the fraction of the training after which all of Q and K learn. Raises MethodError at the
    start when nothing is frozen, now or later: a Trainer that silently trains everything is what this is here against.
    """

    def __init__(self, *, thaw_at: float | None = None) -> None:
        is_number = isinstance(thaw_at, float | int)
        if thaw_at is not None and not (is_number and 0 < thaw_at < 1):
            raise MethodError(f"thaw_at {thaw_at!r}: a fraction of the training, between 0 and 1")
        self.thaw_at = thaw_at
        self._plans: list[tuple[nn.Module, Plan]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        plans = [(owner, plan_of(owner, method, steps=state.max_steps)) for owner, method in methods_of(model)]
        self._plans = [(owner, plan) for owner, plan in plans if plan.moments]
        if record_of(model) is None and not self._plans:
            raise MethodError("nothing is frozen in this model: call oelm.freeze(model, method) before Trainer(...)")
        if self._plans and self.thaw_at is not None:
            raise MethodError(
                f"thaw_at {self.thaw_at}: the method that froze this model says itself when Q and K learn; leave thaw_at out"
            )
        if (self._plans or self.thaw_at is not None) and args.world_size > 1:
            what = "thaw_at" if self.thaw_at is not None else "a method that thaws or freezes in the course of training"
            raise MethodError(
                f"{what}: with several processes, gradients of thawed weights would not be summed; use one process"
            )
        check_frozen(model)
        log.info("%s", audit(model))

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        for owner, plan in self._plans:
            record = record_of(owner)
            frozen, before = plan.frozen_at(state.global_step), set(record.digests) if record is not None else set()
            if frozen != before:
                # Fused weights stay apart: joined again, they would be new tensors that the optimizer does not know.
                hold(owner, frozen)
                _add(owner, before - frozen, given["optimizer"])
                log.info("step %d: thawed %d tensors, froze %d", state.global_step, len(before - frozen), len(frozen - before))
        if self.thaw_at is None or state.global_step < self.thaw_at * state.max_steps or record_of(model) is None:
            return
        assert_unmoved(model)
        names = thaw(model, keep_split=True)
        _add(model, names, given["optimizer"])
        log.info("step %d: thawed %d tensors", state.global_step, len(names))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        check_frozen(given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        check_frozen(given["model"])


def _add(model: nn.Module, names: Collection[str], optimizer: Any) -> None:
    """Give an optimizer the parameters that are to learn from here on."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Into groups that are there already: a new one would not follow the Trainer's schedule. Its first decays, its last not.
    groups = optimizer.param_groups
    known = {id(parameter) for group in groups for parameter in group["params"]}
    for name in sorted(names):
        if id(parameters[name]) not in known:
            groups[-1 if name.endswith("bias") else 0]["params"].append(parameters[name])
            known.add(id(parameters[name]))
