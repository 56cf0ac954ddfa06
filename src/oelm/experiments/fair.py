"""What the arms of a fair comparison may differ in. Does not load torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

# Prefix of the variant of runs with the best settings of their sweep.
TUNED = "tuned-"
_TUNED_ALONE = re.compile(rf"{TUNED}[0-9a-f]{{8}}")
# What the lean and thin controls have less of. Starting weights, dropout and context are not shape.
SHAPE = {"model.model_dim", "model.num_layers", "model.num_heads", "model.ff_dim", "model.qk_dim"}
# A hundredth of a nat, one percent of perplexity or a point of accuracy: the spread of a plain baseline over seeds at
# `laptop` (docs/study.md). One seed cannot tell closer points of a sweep apart. Frozen arms spread more.
CLOSE = 0.01
_METHOD = "method."
# Fields of a method that set how fast an arm learns: a gain from these is not a gain from freezing.
PACE = ("method.layer_lr_decay", "method.warmup_steps")
# What may be tuned for each arm: how it learns, but not how long, on what data, or with how large a model.
TUNABLE = ("optim.", "schedule.", "model.dropout", "precision", *PACE)


def confounding(differing: Collection[str], *, tuned: Collection[str] = (), is_larger: Callable[[], bool]) -> list[str]:
    """Return which of the differing settings, by dotted path, confound the gap between an arm and its baseline.

    The method may differ, but not its pace. An arm with its baseline's method is a control: its shape may differ if it has
    no more parameters than the baseline (`is_larger` is called only then). Settings in `tuned`, which each arm has from the
    same sweep, may differ if they set how a model learns; a larger model or more text would win unfairly.
    """
    method = {key for key in differing if key.startswith(_METHOD)}
    shape = SHAPE.intersection(differing)
    may_be_smaller = bool(shape) and not method and not is_larger()
    allowed = (method - set(PACE)) | {key for key in tuned if key.startswith(TUNABLE)} | (shape if may_be_smaller else set())
    return [key for key in differing if key not in allowed]


def is_tuned_alone(variant: str) -> bool:
    """Whether a variant has only the best of its sweep on top of its budget."""
    return _TUNED_ALONE.fullmatch(variant) is not None


def tuned_alike(arm: str, baseline: str, baseline_of: Mapping[str, str]) -> bool:
    """Whether the experiments that were swept for an arm and for its baseline are themselves an arm and its baseline.

    Otherwise one could win by its tuning.
    """
    return baseline_of.get(arm) == baseline
