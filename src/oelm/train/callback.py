"""`OelmCallback`: the guards of our loop in `transformers.Trainer`."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from oelm.errors import MethodError, MissingExtraError
from oelm.method.apply import thaw
from oelm.method.audit import assert_unmoved, audit
from oelm.method.record import record_of

try:
    from transformers import TrainerCallback
except ImportError:
    raise MissingExtraError("transformers", "hf") from None

log = logging.getLogger(__name__)


class OelmCallback(TrainerCallback):
    """Says at the start what is frozen, proves by digest at every save that it has not moved, and thaws it when told.

    `thaw_at` is the fraction of the training after which Q and K learn too; None leaves them frozen. Raises MethodError
    at the start when nothing is frozen: a Trainer that silently trains everything is what this is here against.
    """

    def __init__(self, *, thaw_at: float | None = None) -> None:
        if thaw_at is not None and not 0 < thaw_at < 1:
            raise MethodError(f"thaw_at {thaw_at}: a fraction of the training, between 0 and 1")
        self.thaw_at = thaw_at

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        if record_of(model) is None:
            raise MethodError("nothing is frozen in this model: call oelm.freeze(model, method) before Trainer(...)")
        if self.thaw_at is not None and args.world_size > 1:
            raise MethodError("thaw_at under several processes: gradients of thawed weights would not be summed; leave it out")
        assert_unmoved(model)
        log.info("%s", audit(model))

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        if self.thaw_at is None or state.global_step < self.thaw_at * state.max_steps or record_of(model) is None:
            return
        assert_unmoved(model)
        # Fused weights stay apart: joined again, they would be new tensors that the optimizer does not know.
        names = thaw(model, keep_split=True)
        parameters = dict(model.named_parameters())
        # Into groups that are there already: a new one would not follow the Trainer's schedule. Its first decays, its last not.
        groups = given["optimizer"].param_groups
        for name in names:
            groups[-1 if name.endswith("bias") else 0]["params"].append(parameters[name])
        log.info("step %d: thawed %d tensors", state.global_step, len(names))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if record_of(given["model"]) is not None:
            assert_unmoved(given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if record_of(given["model"]) is not None:
            assert_unmoved(given["model"])
