"""What a comparison asks: tries of one question, at other rates or other seeds, count as looks at it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from oelm.dotted import flatten
from oelm.experiments.fair import TUNABLE
from oelm.report.collect import Arm
from oelm.report.verdict import comparison_key

# What is asked about, beside what the experiment and the budget say: the method, the model, how much text. The data is known by
# its fingerprint, wherever it lies.
_ASKED = ("method.", "model.", "data.max_tokens", "examples.", "steps", "epochs", "batch_size", "init_from.sha256")
_PLACES = ("model.source", "examples.folder", "examples.dev")


def question_of(arm: Arm) -> str:
    """Return a short digest of what an arm asks: the same for every rate, schedule and seed at which it is tried.

    A setting that is off, or that an older record lacks, asks nothing.
    """
    run = arm.first
    asked = {
        key: value
        for key, value in flatten(run.recipe).items()
        if key.startswith(_ASKED) and not key.startswith((*TUNABLE, *_PLACES)) and value
    }
    told = json.dumps([run.fingerprint, sorted(asked.items())], default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def questions_of(arms: Iterable[Arm]) -> dict[str, str]:
    """Return what the arms that can be used ask, by the key of their looks."""
    return {comparison_key(*arm.key): question_of(arm) for arm in arms if arm.is_usable}
