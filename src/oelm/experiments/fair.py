"""What the arms of a fair comparison may differ in; known without loading torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

# How the variant of runs begins that have the best of their sweep.
TUNED = "tuned-"
_TUNED_ALONE = re.compile(rf"{TUNED}[0-9a-f]{{8}}")
# What the lean and thin controls have less of. Other weights to start from, another dropout or another context are no shape.
SHAPE = {"model.model_dim", "model.num_layers", "model.num_heads", "model.ff_dim", "model.qk_dim"}
# A hundredth of a nat, one percent of perplexity, or a point of accuracy: what seeds move a plain baseline by at `laptop`
# (docs/study.md), so that one seed does not tell points of a sweep apart that lie closer. Frozen arms move more.
CLOSE = 0.01
_METHOD = "method."
# Fields of a method that say how fast an arm learns: a gain by these is none of freezing.
PACE = ("method.layer_lr_decay", "method.warmup_steps")
# What each arm may have its own best of: how it learns, not how much, from what, or with how large a model.
TUNABLE = ("optim.", "schedule.", "model.dropout", "precision", *PACE)


def confounding(differing: Collection[str], *, tuned: Collection[str] = (), is_larger: Callable[[], bool]) -> list[str]:
    """Return which of the settings that an arm and its baseline differ in, by dotted path, make their gap prove nothing.

    The method is the question, its pace is not. An arm of its baseline's method is a control, and its shape may differ as long
    as it has no more parameters than the baseline; only then `is_larger` is asked. Settings in `tuned`, which each has from the
    same sweep, may differ too, as far as they say how a model learns: by its size or by more text one would win unfairly.
    """
    method = {key for key in differing if key.startswith(_METHOD)}
    shape = SHAPE.intersection(differing)
    may_be_smaller = bool(shape) and not method and not is_larger()
    allowed = (method - set(PACE)) | {key for key in tuned if key.startswith(TUNABLE)} | (shape if may_be_smaller else set())
    return [key for key in differing if key not in allowed]


def is_tuned_alone(variant: str) -> bool:
    """Whether a variant has the best of its sweep, and else its budget's own settings."""
    return _TUNED_ALONE.fullmatch(variant) is not None


def tuned_alike(arm: str, baseline: str, baseline_of: Mapping[str, str]) -> bool:
    """Whether an arm and its baseline had the same chance to be tuned: by whose sweeps each got its best, its own or not.

    The two that were swept must be an arm and its baseline: else one would win by its tuning.
    """
    return baseline_of.get(arm) == baseline
